"""`python -m fluster_services.controller`: a controller for the cluster that FLUSTER_CLUSTER_ADDRESS names."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fluster_bus.core.errors import CredentialsError
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import NamespaceBounds
from fluster_bus.messages import Namespace
from fluster_bus.storage.replication import Replication
from fluster_services.config import DaemonLogs, RecordLimits, Timing
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.daemon import address_from_environment, run_daemon
from fluster_services.settings import SettingError, read_settings, refusing

if TYPE_CHECKING:
    from fluster_bus.trust.signer import Signer


def main() -> None:
    with refusing():
        config = _config_from_environment()
    run_controller(config)


def _config_from_environment() -> ControllerConfig:
    namespaces = os.environ.get("FLUSTER_NAMESPACES", "default").split(",")
    signing_keys = os.environ.get("FLUSTER_SIGNING_KEYS")
    return ControllerConfig(
        address=address_from_environment(),
        namespaces=tuple(Namespace(name.strip()) for name in namespaces),
        timing=read_settings(Timing),
        records=read_settings(RecordLimits),
        bounds=read_settings(NamespaceBounds),
        replication=read_settings(Replication),
        controller_id=os.environ.get("FLUSTER_CONTROLLER_ID", f"controller-{socket.gethostname()}-{os.getpid()}"),
        signers=_signers(signing_keys) if signing_keys else {},
    )


def _signers(file: str) -> Mapping[Role, Signer]:
    from fluster_bus.trust.signer import read_signing_keys

    try:
        return read_signing_keys(Path(file))
    except CredentialsError as error:
        raise SettingError(f"FLUSTER_SIGNING_KEYS: {error}") from error


def run_controller(
    config: ControllerConfig,
    *,
    ready_fd: int | None = None,
    owner_fd: int | None = None,
    log_file: Path | None = None,
    log_bytes: int = DaemonLogs.file_bytes,
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until the owner is gone."""
    starts = (
        itertools.count()
    )  # one that was deposed waits for the lease, also if it was by a controller of the same id
    run_daemon(
        lambda bus, ready: Controller(bus, config, in_place=next(starts) == 0).run(ready),
        address=config.address,
        name=config.controller_id,
        ready_fd=ready_fd,
        owner_fd=owner_fd,
        log_file=log_file,
        log_bytes=log_bytes,
    )


if __name__ == "__main__":
    main()
