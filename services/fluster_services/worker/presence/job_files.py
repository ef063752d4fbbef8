"""A folder of credentials that a worker hands to jobs: a file for each namespace whose jobs it runs."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import NamedTuple

from fluster_bus.access.address import BusAddress
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.core.errors import AddressError, InvalidNameError
from fluster_bus.core.names import check_namespace
from fluster_bus.core.roles import Role, User
from fluster_bus.messages import Namespace

log = logging.getLogger(__name__)

_SUFFIXES = (".json", ".creds")
_MAX_FILES = 1_000


class _Seen(NamedTuple):
    """By what a file is known to be the one that was read."""

    changed_at_ns: int
    size: int
    inode: int


def of_job(found: BusAddress) -> Namespace | None:
    """The namespace whose jobs these credentials are of; None for those of anybody else. Raises CredentialsError."""
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
        """The credentials that lie there now. What cannot be read is told in the log, once. Raises OSError without a folder.

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
