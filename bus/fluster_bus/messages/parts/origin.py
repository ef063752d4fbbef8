"""Where a command was submitted, so that a worker that shares that place can run it as if it were typed there."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import Field

from fluster_bus.messages.parts.model import Message, is_carried
from fluster_bus.running.fence_clock import boot_id

# What decides which programs, and which Python, a shell finds.
SEARCH_VARIABLES = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


class Origin(Message):
    """The machine, user, folder and search path of the submitter of a command.

    A folder is distinguished from another of the same path by its device and inode; without one the task's own folder is meant.
    """

    host: str
    uid: int
    search: Mapping[str, str] = Field(default_factory=dict)  # of SEARCH_VARIABLES those that are set
    folder: str | None = None
    device: int = 0
    inode: int = 0

    @classmethod
    def here(cls, *, folder: Path | None = None) -> Self:
        """That of this process, in `folder`."""
        search = {name: os.environ[name] for name in SEARCH_VARIABLES if is_carried(os.environ.get(name, "\0"))}
        place = {"host": _host(), "uid": os.getuid(), "search": search}
        try:
            status = folder.stat() if folder is not None else None
        except OSError:  # it was deleted, or may not be looked at
            status = None
        if status is not None:
            # One that is not UTF-8 gets a name under which no worker finds it: the task runs in a folder of its own, and says why.
            name = os.fsencode(str(folder)).decode(errors="backslashreplace")
            place |= {"folder": name, "device": status.st_dev, "inode": status.st_ino}
        return cls.model_validate(place)

    def is_same_user_here(self) -> bool:
        """True when this process has the same machine, the same files and the same user."""
        return (self.host, self.uid) == (_host(), os.getuid())

    def sees_folder(self) -> bool:
        """True when this process has the same user, and sees the same folder under that path."""
        if self.folder is None or self.uid != os.getuid():
            return False
        try:
            status = Path(self.folder).stat()
        except (OSError, ValueError):  # ValueError: a path with a zero byte in it
            return False
        return (status.st_dev, status.st_ino) == (self.device, self.inode) and os.access(self.folder, os.X_OK)


@functools.cache
def _host() -> str:
    """Names this machine and its file system: containers of one machine have the same boot, and different files."""
    boot = boot_id() or socket.gethostname()
    root = Path("/").stat()
    return f"{boot}-{root.st_dev}-{root.st_ino}"
