"""What `fluster worker start` does for a join token, before it becomes the worker: that never has the token."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fluster.cli.common.exit_codes import CommandError, ExitCode, say
from fluster.local_setup import default_state_dir, default_worker_id

if TYPE_CHECKING:
    from fluster_bus.trust.join_tokens import JoinedFolder

JOIN_VARIABLE = "FLUSTER_JOIN"
_FOLDER = "joined"  # in the state folder
_PAUSE_S = 2.0
_SAY_WAITING_S = 30.0


def joined_environment(
    token: str | None, *, has_address: bool, worker_id: str | None, state_dir: str | None, namespaces: str | None
) -> dict[str, str] | None:
    """{variable: value} by which a worker uses the credentials that it got for its token, now or before; None for one without.

    Waits until servers and a controller answer. Raises CommandError, BusError.
    """
    if token is None and has_address:
        return None
    folder = (Path(state_dir) if state_dir else default_state_dir()) / _FOLDER
    if token is None and not (folder / "worker.creds").exists():
        return None
    from fluster_bus.access.address import ADDRESS_VARIABLE
    from fluster_bus.core.roles import Role, User
    from fluster_bus.trust.join_tokens import JoinedFolder

    joined = JoinedFolder(folder)
    if joined.worker_file.exists():
        if token is not None:
            say(f"uses the credentials in {folder}, for which it has joined before; without that folder it joins anew")
    else:
        names = [each.strip() for each in (namespaces or "").split(",") if each.strip()]
        _join(token or "", worker_id or default_worker_id(), joined, names)
    jobs = {User(Role.JOB, each).credentials_variable: str(file) for each, file in joined.job_files().items()}
    return {ADDRESS_VARIABLE: str(joined.worker_file), **jobs}


def _join(text: str, worker_id: str, folder: JoinedFolder, namespaces: list[str]) -> None:
    from fluster_bus.core.errors import (
        BusyError,
        ConnectError,
        CredentialsError,
        DisconnectedError,
        NoRespondersError,
        RequestTimeoutError,
        ServiceError,
    )
    from fluster_bus.trust.join_tokens import JoinToken, join

    token, say_at = JoinToken.parse(text), 0.0
    while True:
        try:
            asyncio.run(join(token, worker_id, folder, namespaces))
        except CredentialsError as error:
            raise CommandError(
                f"the join token {token.token_id} is not taken: it has expired or was revoked, or is of another cluster ({error})",
                ExitCode.NO_CLUSTER,
            ) from error
        except (BusyError, ConnectError, DisconnectedError, NoRespondersError, RequestTimeoutError) as error:
            if time.monotonic() >= say_at:
                say(f"waits for the cluster, and tries again each few seconds: {error}")
                say_at = time.monotonic() + _SAY_WAITING_S
            time.sleep(_PAUSE_S * random.uniform(0.5, 1))
        except ServiceError as error:
            raise CommandError(str(error), ExitCode.NO_CLUSTER) from error
        else:
            say(f"{worker_id} has joined by the token {token.token_id}")
            return
