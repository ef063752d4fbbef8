"""What is left of an attempt that its keeper does not end, and its end by force."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_services.worker.contract.attempt_directory import LaunchSpec
from fluster_services.worker.keeper.keeper_notes import start_note
from fluster_services.worker.linux import cgroups
from fluster_services.worker.linux.killing import BY_FORCE
from fluster_services.worker.linux.processes import boot_id, descendants, leftovers, process_state


def kill_leftovers(directory: Path, spec: LaunchSpec) -> list[int]:
    """SIGKILL the processes of an attempt, but not its keeper; returns those that were found, so none once all are gone.

    They are found as the keeper's descendants while it lives, in the attempt's groups where the machine has any, and by the
    task's session and the environment they were executed with.
    """
    known = started(directory)
    if known is None:
        return []
    keeper_lives = keeper_state(known) is not None
    if spec.container is not None:
        if keeper_lives:  # the process that attends the container ends it; without a keeper it has done so by itself
            with suppress(ProcessLookupError):
                os.kill(known["task_pid"], BY_FORCE)
        return []
    found = set(cgroups.kill(spec.groups))
    found.update(_living(descendants(known["keeper_pid"])) if keeper_lives else ())
    mark = f"{DIRECTORY_VARIABLE}={directory}"
    found.update(leftovers(known["task_pid"], known["started_since_boot_s"], mark))
    # The main process first: it is not to see its children die, and end for that.
    for pid in sorted(found, key=lambda each: each != known["task_pid"]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return sorted(found)


def started(directory: Path) -> dict[str, Any] | None:
    """What the keeper in `directory` wrote when it started its task; None if it did not, or before the machine's last start."""
    known = start_note(directory)
    return known if known is not None and known["boot_id"] == boot_id() else None


def keeper_state(known: dict[str, Any]) -> str | None:
    """The kernel's letter for the state of a keeper, by what it wrote at its start; None when it is dead."""
    return process_state(known["keeper_pid"], started_by_s=known["started_since_boot_s"])


def kill_keeper(known: dict[str, Any]) -> None:
    """SIGKILL the keeper that wrote `known` at its start. A stranger that was given its number meanwhile is left alone."""
    try:
        fd = os.pidfd_open(known["keeper_pid"])
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # the system has none: one may end between the look and the signal
        fd = None
    try:
        if keeper_state(known) is None:
            return
        with suppress(ProcessLookupError):
            if fd is not None:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            else:
                os.kill(known["keeper_pid"], signal.SIGKILL)
    finally:
        if fd is not None:
            os.close(fd)


def _living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if process_state(pid, started_by_s=float("inf")) is not None]
