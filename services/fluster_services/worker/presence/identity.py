"""Which worker this is, of which namespaces, and what it hands to their jobs: settings, and what its credentials say."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from fluster.local_setup import WORKER_ID_VARIABLE, default_worker_id
from fluster_bus.access.address import BusAddress
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.core.errors import AddressError
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role, User
from fluster_bus.messages import Namespace, WorkerId
from fluster_services.settings import SettingError
from fluster_services.worker.presence.job_files import JobFiles

_NAMESPACES, _FOLDER = "FLUSTER_NAMESPACES", "FLUSTER_JOB_CREDENTIALS_DIR"


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
