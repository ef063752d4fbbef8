"""Which worker this is, of which namespaces, and what it hands to their jobs: settings, credentials, and a folder of files."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fluster.local_setup import WORKER_ID_VARIABLE, default_worker_id
from fluster_bus.access.address import BusAddress
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.core.errors import AddressError, InvalidNameError
from fluster_bus.core.names import check_namespace
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role, User
from fluster_bus.messages import Namespace, WorkerId
from fluster_services.settings import SettingError

_NAMESPACES, _FOLDER = "FLUSTER_NAMESPACES", "FLUSTER_JOB_CREDENTIALS_DIR"
log = logging.getLogger(__name__)

_SUFFIXES = (".json", ".creds")
_MAX_FILES = 1_000


def worker_id(address: BusAddress) -> WorkerId:
    """FLUSTER_WORKER_ID, or the name in signed credentials of a worker, or the host's. Raises SettingError."""
    given, signed = os.environ.get(WORKER_ID_VARIABLE), _signed_worker(address)
    if given and signed is not None and given != signed:
        raise SettingError(
            f"{WORKER_ID_VARIABLE}={given!r}, but its credentials are of the worker {signed!r}: leave the setting out, or run "
            f"`fluster credentials add worker {given}`"
        )
    return WorkerId(given or signed or default_worker_id())


def served_namespaces(address: BusAddress) -> list[Namespace]:
    """FLUSTER_NAMESPACES, or those in signed credentials of a worker. Raises SettingError."""
    text, signed = os.environ.get(_NAMESPACES), address.namespaces if _signed_worker(address) is not None else None
    if not text:
        return [Namespace(name) for name in (signed if signed is not None else (DEFAULT_NAMESPACE,))]
    names = [Namespace(name.strip()) for name in text.split(",")]
    strange = [name for name in names if signed is not None and name not in signed]
    if strange:
        raise SettingError(
            f"{_NAMESPACES}={text!r}, but its credentials are good for {', '.join(signed or ()) or 'none'}: leave "
            f"{', '.join(strange)} out, or issue credentials of a worker for all of them"
        )
    return names


def job_credentials(address: BusAddress) -> tuple[dict[Namespace, BusAddress], Path | None]:
    """What the worker hands to jobs, by the namespaces that it serves; and the folder in which those of further ones may come.

    Without FLUSTER_NAMESPACES it serves every namespace whose jobs' credentials are in the folder, as far as its own let it.
    Raises SettingError.
    """
    names, folder = served_namespaces(address), os.environ.get(_FOLDER) or None
    if folder is None:
        return {each: job_address(address, User(Role.JOB, each)) for each in names}, None
    try:
        found = JobFiles(Path(folder), address).read()
    except OSError as error:
        raise SettingError(
            f"{_FOLDER}={folder!r} cannot be read: {error.strerror}; give the path of a folder"
        ) from error
    signed = address.namespaces if _signed_worker(address) is not None else None
    is_chosen = bool(os.environ.get(_NAMESPACES))
    if not is_chosen:
        names = list(dict.fromkeys([*names, *(each for each in found if signed is None or each in signed)]))
    served = {}
    for each in names:
        user = User(Role.JOB, each)
        if each in found and not _is_set(user):
            served[each] = found[each]
        elif is_chosen or _is_set(user):
            served[each] = job_address(address, user)
    if not served:
        may = f" of {', '.join(signed)}" if signed else ""
        raise SettingError(
            f"{_FOLDER}={folder!r} has no credentials of jobs{may}, and no setting names any: put a file there that `fluster credentials` "
            "made for the role job"
        )
    return served, None if is_chosen else Path(folder)


def _is_set(user: User) -> bool:
    return bool(os.environ.get(user.credentials_variable) or os.environ.get(user.password_variable))


def why_not_apart(namespaces: Iterable[str]) -> str:
    """What an operator should know of a worker that runs jobs of these namespaces as processes."""
    return (
        f"jobs of namespaces {', '.join(sorted(namespaces))} run as processes of one user here, and can read each other's files and "
        "memory: give each namespace workers of its own, or run tasks in containers (--runtime docker)"
    )


def job_address(address: BusAddress, user: User) -> BusAddress:
    """What the worker hands to the jobs of a namespace: far less than it may do itself. Raises SettingError."""
    password, file = os.environ.get(user.password_variable), os.environ.get(user.credentials_variable)
    if file:
        try:
            found = address.with_credentials(Path(file))
        except AddressError as error:
            raise SettingError(f"{user.credentials_variable}: {error}") from error
        _check_job(found, user, file)
        return found
    if not password:
        raise SettingError(
            f"neither {user.credentials_variable} nor {user.password_variable} is set: "
            f"the worker hands the credentials to the jobs of {user.namespace!r}"
        )
    return replace(address, user=user.name, password=password, token=None, seed=None, file=None)


def _check_job(found: BusAddress, user: User, file: str) -> None:
    if found.token is None:
        if found.user != user.name:
            raise SettingError(
                f"{user.credentials_variable}: the file {file} is of {found.user!r}, and jobs are {user.name!r}"
            )
        return
    roles = read_user_token(found.token).tagged("role")
    if roles != (Role.JOB,) or found.namespaces != (user.namespace,):
        raise SettingError(
            f"{user.credentials_variable}: the file {file} is of {found.user!r}, role {'/'.join(roles) or 'unknown'} in "
            f"{', '.join(found.namespaces) or 'no namespace'}: jobs need the role job in {user.namespace!r} alone, as "
            f"`fluster credentials add job NAME --namespace {user.namespace}` makes it"
        )


def _signed_worker(address: BusAddress) -> str | None:
    """The worker that signed credentials are of."""
    if address.token is None or read_user_token(address.token).tagged("role") != (Role.WORKER,):
        return None
    return address.user


class _Seen(NamedTuple):
    """By what a file is known to be the one that was read."""

    changed_at_ns: int
    size: int
    inode: int


def of_job(found: BusAddress) -> Namespace | None:
    """The namespace whose jobs these credentials are of; None for those of other users. Raises CredentialsError."""
    if found.token is not None:
        is_job = read_user_token(found.token).tagged("role") == (Role.JOB,)
        return Namespace(found.namespaces[0]) if is_job and len(found.namespaces) == 1 else None
    if len(found.namespaces) != 1:
        return None
    try:
        namespace = Namespace(check_namespace(found.namespaces[0]))
    except InvalidNameError:
        return None
    return namespace if found.user == User(Role.JOB, namespace).name else None


class JobFiles:
    """The files of one folder. Those of other users than jobs are passed over, so it may hold those of a whole cluster."""

    def __init__(self, folder: Path, address: BusAddress) -> None:
        """`address` says where the servers are; its credentials are the worker's own, and are handed to no job."""
        self.folder = folder
        self._address = address
        self._seen: dict[str, _Seen] = {}
        self._found: dict[str, tuple[Namespace, BusAddress] | None] = {}  # {file: what it has}

    def read(self) -> dict[Namespace, BusAddress]:
        """The credentials that lie there now. What cannot be read is logged, once. Raises OSError without a folder.

        Looks at 1,000 files at most, by name.
        """
        with os.scandir(self.folder) as entries:
            names = sorted(each.name for each in entries if each.name.endswith(_SUFFIXES))
        here = list(itertools.islice(names, _MAX_FILES))
        for name in [each for each in self._seen if each not in here]:
            del self._seen[name], self._found[name]
        for name in here:
            self._look_at(name)
        return dict(each for each in self._found.values() if each is not None)

    def _look_at(self, name: str) -> None:
        path = self.folder / name
        try:
            stat = path.stat()
        except FileNotFoundError:  # taken away just now
            return
        seen = _Seen(stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if self._seen.get(name) == seen:
            return
        self._seen[name], self._found[name] = seen, None
        try:
            found = self._address.with_credentials(path)
            namespace = of_job(found)
        except AddressError as error:
            log.warning("credentials of jobs are looked for in %s: %s", self.folder, error)
            return
        if namespace is not None:
            self._found[name] = namespace, found
