"""Processes that cannot fork: a group of them that may have no more members."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from fluster_services.worker.linux.limits import find_controllers
from tests import optional
from tests.waiting import wait_until


class Crowd:
    """The group in `folder`, which may grow until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, pid: int) -> None:
        """Have a process in it, with all that descends from it."""
        for each in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            (self._folder / "cgroup.procs").write_text(str(each.pid))

    def close(self, *, room: int = 0) -> None:
        """From now on its processes can make `room` more, or threads, and no others."""
        now = int((self._folder / "pids.current").read_text())
        (self._folder / "pids.max").write_text(str(now + room))

    def open(self) -> None:
        """They can again."""
        (self._folder / "pids.max").write_text("max")


@contextmanager
def crowd() -> Iterator[Crowd]:
    """A group, gone with the block; where none can be made the test is skipped, or fails if FLUSTER_REQUIRE names cgroups."""
    try:
        own, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
        folder = find_controllers(own, mounts, "pids")["pids"].folder / f"fluster-test-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        made = Crowd(folder)
        made.open()
    except (OSError, KeyError) as error:
        optional.skip("cgroups", f"processes that cannot fork need a group of their own: {error}")
    try:
        yield made
    finally:
        made.open()
        wait_until(lambda: not (folder / "cgroup.procs").read_text().strip())
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)  # noqa: PTH106 - the files in it are the kernel's
