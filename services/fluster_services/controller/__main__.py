"""`python -m fluster_services.controller`: a controller for the cluster that FLUSTER_CLUSTER_ADDRESS names."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

from fluster_bus.messages import Namespace
from fluster_services.config import Timing
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.daemon import address_from_environment, run_daemon


def main() -> None:
    namespaces = os.environ.get("FLUSTER_NAMESPACES", "default").split(",")
    config = ControllerConfig(
        address=address_from_environment(),
        namespaces=tuple(Namespace(name.strip()) for name in namespaces),
        timing=Timing(owner_lease_s=seconds_from_environment("FLUSTER_OWNER_LEASE_S", Timing.owner_lease_s)),
        controller_id=os.environ.get("FLUSTER_CONTROLLER_ID", f"controller-{socket.gethostname()}-{os.getpid()}"),
    )
    run_controller(config)


def seconds_from_environment(variable: str, default: float) -> float:
    """What the variable says. Raises ValueError, which names it."""
    text = os.environ.get(variable)
    try:
        return default if text is None else float(text)
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: give a number of seconds") from error


def run_controller(
    config: ControllerConfig, *, ready_fd: int | None = None, owner_fd: int | None = None, log_file: Path | None = None
) -> None:
    """Serve until SIGTERM or Ctrl-C, or until the owner is gone."""
    starts = itertools.count()  # whoever was deposed waits in line, also if it was by a controller of the same id
    run_daemon(
        lambda bus, ready: Controller(bus, config, in_place=next(starts) == 0).run(ready),
        address=config.address,
        name=config.controller_id,
        ready_fd=ready_fd,
        owner_fd=owner_fd,
        log_file=log_file,
    )


if __name__ == "__main__":
    main()
