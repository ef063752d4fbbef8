"""The clusters that `fluster up` runs on this host for this user: what finds them without an address."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

from fluster_bus.access.address import ADDRESS_VARIABLE, BusAddress
from fluster_bus.core.errors import NoAddressError

RUN_DIR_VARIABLE = "FLUSTER_RUN_DIR"
_SUFFIX = ".up.json"


@dataclass(frozen=True)
class UpCluster:
    """One `fluster up` that runs: its process, where its credentials are, where it keeps its records, since when."""

    pid: int
    address_file: str
    store_dir: str
    started_at: float


def run_dir() -> Path:
    """The folder in which clusters that are up are noted: FLUSTER_RUN_DIR, else one of this user's in the temporary
    folder.
    """
    given = os.environ.get(RUN_DIR_VARIABLE)
    return Path(given) if given else Path(tempfile.gettempdir()) / f"fluster_up_{os.getuid()}"


@contextlib.contextmanager
def noted(address_file: Path, store_dir: Path) -> Generator[None]:
    """Have other programs of this user find the cluster, for as long as this process lives and the block lasts.

    The note is locked by this process: the lock ends with it in whatever way, and then the note counts no more.
    """
    folder = run_dir()
    cluster = UpCluster(os.getpid(), str(address_file.absolute()), str(store_dir.absolute()), time.time())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(folder)
        draft = folder / secrets.token_hex(8)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, json.dumps(asdict(cluster)).encode())
        except OSError:  # there is no room for it
            os.close(descriptor)
            draft.unlink()
            raise
    except OSError as error:
        # It runs all the same: its address is printed.
        sys.stderr.write(
            f"fluster: other programs cannot find this cluster by themselves: {folder}: {error.strerror}; set "
            "FLUSTER_CLUSTER_ADDRESS for them, or FLUSTER_RUN_DIR to another folder for all\n"
        )
        yield
        return
    note = draft.with_name(draft.name + _SUFFIX)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        draft.rename(note)  # locked and whole before another process can read it
        try:
            yield
        finally:
            note.unlink(missing_ok=True)


def running() -> list[UpCluster]:
    """The clusters that are up, the oldest first. Notes of those that were killed are removed."""
    folder = run_dir()
    try:
        _check_own(folder)
        found = [_read(note) for note in folder.glob(f"*{_SUFFIX}")]
    except OSError:
        return []
    # Without its address it is on its way out.
    alive = [each for each in found if each is not None and Path(each.address_file).exists()]
    return sorted(alive, key=lambda each: each.started_at)


def wait_ended(cluster: UpCluster) -> None:
    """Return when the process of that cluster has ended, or lets go of its note."""
    for note in run_dir().glob(f"*{_SUFFIX}"):
        if _read(note) == cluster:
            with contextlib.suppress(OSError), note.open(encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH)


def find_address() -> BusAddress:
    """What FLUSTER_CLUSTER_ADDRESS says, else the address of the only cluster that is up, which is then said on stderr.

    Raises NoAddressError when there is none, or more than one; AddressError when what the variables say cannot be used.
    """
    try:
        return BusAddress.from_environment()
    except NoAddressError as error:
        found = running()
        if not found:
            raise
        if len(found) > 1:
            files = ", ".join(cluster.address_file for cluster in found)
            raise NoAddressError(
                f"{ADDRESS_VARIABLE} is not set, and {len(found)} clusters of this user are up: set it to one of "
                f"{files}"
            ) from error
    (cluster,) = found
    address = BusAddress.parse(cluster.address_file)
    sys.stderr.write(
        f"fluster: {ADDRESS_VARIABLE} is not set: taking the `fluster up` that runs, {cluster.address_file}\n"
    )
    return address


def _check_own(folder: Path) -> None:
    """Raises OSError unless the folder is this user's, and no other user can put a note there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(1, "others may write there", str(folder))


def _read(note: Path) -> UpCluster | None:
    """The cluster that a note names; None, and the note is removed, when its process is gone."""
    with contextlib.suppress(OSError, ValueError, TypeError), note.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return UpCluster(**json.load(file))
        note.unlink(missing_ok=True)
    return None
