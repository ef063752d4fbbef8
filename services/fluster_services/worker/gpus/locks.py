"""The lock of each GPU of this machine: a file in a folder that all users and clusters of the machine share.

Who holds the lock (flock) has the GPU. A process may have closed the descriptor and go on to compute, and a container never has
it: so the file also names its last holder in a note, and who takes the lock must know that holder to be gone (holders.py). A note is
removed once all processes of its holder have ended.

Every user can write to these files. So no link is followed, nothing is written to what is not such a lock, and what is read
is data: at worst another user keeps a GPU from being used, which he could do by using it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path

FOLDER_VARIABLE = "FLUSTER_GPU_LOCKS"
_PLACES = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 - it belongs to root, and is sticky, or is not taken
_PREFIX = "fluster-gpu-"
NOTE_BEGIN = '{"fluster":'
MAX_NOTE_BYTES = 8_192
_PATIENCE_S, _PAUSE_S = 0.5, 0.01  # others hold a lock for a moment when they look whether it is held
_OPEN_TRIES = 50
_MODE = 0o666  # whatever the umask: all users of the machine take the same locks
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class GpuTakenError(Exception):
    """Another holder has the GPU, or had it and is not known to be gone; the text says who, and what helps."""


def find_lock_folder(given: str | None) -> Path:
    """The folder with the locks of this machine: the one that is given, which is made if need be, else /run/lock or /tmp.

    Raises OSError when there is none in which others could not take a file away from under its users.
    """
    if given:
        folder = Path(given)
        with suppress(FileExistsError):
            folder.mkdir()
            folder.chmod(0o1777)
        _check_folder(folder)
        return folder
    for place in _PLACES:
        if _is_shared(place):  # by what it is, not by who asks: all of a machine must choose the same
            return place
    names = " or ".join(map(str, _PLACES))
    raise OSError(errno.ENOENT, f"neither is a sticky folder of root's; name one with {FOLDER_VARIABLE}", names)


def _check_folder(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is not a folder, or is a link to one", str(folder))
    if status.st_uid not in {0, os.geteuid()}:
        raise PermissionError(errno.EPERM, "it belongs to another user, who could replace the locks in it", str(folder))
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EPERM, "others may remove files in it: make it sticky (chmod 1777)", str(folder))


def _is_shared(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and status.st_mode & 0o1002 == 0o1002


def lock_path(folder: Path, uuid: str) -> Path:
    """Where the lock of a GPU, or of an instance of one, is."""
    return folder / (_PREFIX + re.sub(r"[^A-Za-z0-9-]", "_", uuid)[:100])


class GpuLock:
    """One lock file, open. Its descriptor may be passed on to other processes: the lock is held until the last has closed it."""

    def __init__(self, path: Path) -> None:
        """Open the file, which is made if need be. Raises OSError when it is none that Fluster made."""
        self.path = path
        self._fd = _opened(path)

    @property
    def fd(self) -> int:
        return self._fd

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def is_held(self) -> bool:
        """Whether it is held at this moment."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def take(self, *, gone: str, patience_s: float = _PATIENCE_S) -> None:
        """Hold it. `gone` is the note of a holder that is known to be gone, empty where there was none.

        Raises GpuTakenError when it is held, or has another note; OSError.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise GpuTakenError("it is held") from None
                time.sleep(_PAUSE_S)
                continue
            if _is_at(self.path, self._fd):
                break
            os.close(self._fd)  # the file was removed, and another process has made a new one
            self._fd = _opened(self.path)
        if self.note() not in {"", gone}:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            raise GpuTakenError("its last holder is not known to be gone")

    def note(self) -> str:
        """What the last holder wrote, as it stands; empty when all of it has ended."""
        text = os.pread(self._fd, MAX_NOTE_BYTES, 0).decode(errors="replace")
        return text.partition("\n")[0] or text[:1]

    def write_note(self, note: str) -> None:
        """Name the holder, who must hold the lock. Raises OSError, also for a file that has something else in it."""
        if (found := self.note()) and not found.startswith(NOTE_BEGIN):
            raise OSError(
                errno.EEXIST, "it contains something other than the note of a lock: remove it", str(self.path)
            )
        data = note.encode() + b"\n"
        if len(data) > MAX_NOTE_BYTES:
            raise OSError(errno.EMSGSIZE, f"the note of its holder is {len(data)} bytes long", str(self.path))
        # By one write: only the first line counts, so that no end of a longer note before it does any harm.
        if os.pwrite(self._fd, data, 0) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.ftruncate(self._fd, len(data))

    def clear_note(self) -> None:
        """All of the holder has ended. Raises OSError."""
        os.ftruncate(self._fd, 0)

    def touch(self) -> None:
        """Have programs that remove old files leave it."""
        with suppress(OSError):
            os.utime(self._fd)


def _opened(path: Path) -> int:
    for _ in range(_OPEN_TRIES):
        try:
            fd = os.open(path, _FLAGS)
        except FileNotFoundError:
            try:  # apart from the opening: in a sticky folder, Linux refuses O_CREAT for what another user made
                fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, _MODE)
            except FileExistsError:
                continue
            os.fchmod(fd, _MODE)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return fd
        os.close(fd)
        if status.st_nlink:
            raise OSError(errno.EINVAL, "it is not a file of its own, as locks are: remove it", str(path))
    raise OSError(errno.EAGAIN, "it is removed again and again", str(path))


def _is_at(path: Path, fd: int) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
