"""The users of a local cluster's server, to which those of a namespace are added while it runs.

The supervisor has the server. Controllers write wishes, a line each, into a pipe that it reads:

    controller ─► supervisor   add NAMESPACE, forget NAMESPACE

and see that one is fulfilled by the file with the credentials of the namespace's jobs, which the server takes from then on. From the
folder of these files workers know which namespaces they serve. Which were added stands in a file, for the cluster's next start.
The controllers' end is in `controller/namespace_reconciler.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluster.json_lines import BadLineError, Lines
from fluster_bus.access.address import write_private
from fluster_bus.core.errors import FlusterError
from fluster_bus.core.names import check_namespace
from fluster_bus.core.roles import Role

if TYPE_CHECKING:
    from fluster_bus.server import EmbeddedServer

JOBS_FOLDER = "job-credentials"
_ADDED_FILE = "namespaces.json"
ADD, FORGET = "add", "forget"
_READ_BYTES = 65_536


def added_before(store_dir: Path) -> list[str]:
    """The namespaces that were added to the cluster of this folder when it ran last. Raises FlusterError."""
    file = store_dir / _ADDED_FILE
    if not file.exists():
        return []
    try:
        return [check_namespace(str(each)) for each in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise FlusterError(
            f"the file {file}, which lists the namespaces that were added, cannot be read: {error}; name them by `--namespace`, and remove it"
        ) from error


class AddedUsers:
    """The supervisor's end."""

    def __init__(self, server: EmbeddedServer, store_dir: Path, given: Sequence[str]) -> None:
        """`given` are the namespaces that the owner has named, which are not written down."""
        self._server = server
        self._file = store_dir / _ADDED_FILE
        self._folder = store_dir / JOBS_FOLDER
        self._added = {each for each in server.namespaces if each not in given}
        self._given = frozenset(given)
        self.end, self.wishes = os.pipe()  # a wish is shorter than what a pipe takes in one piece
        os.set_blocking(self.end, False)
        os.set_blocking(self.wishes, False)
        self._lines = Lines(_READ_BYTES)

    def write_all(self) -> None:
        """Write the files of all namespaces, and no others: the server runs, with passwords of its own. Raises OSError, AddressError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for old in self._folder.iterdir():
            old.unlink()
        for namespace in self._server.namespaces:
            self._write(namespace)

    def _write(self, namespace: str) -> None:
        self._server.credentials(Role.JOB, namespace).save(self._folder / f"{namespace}.json")

    def on_wishes(self) -> None:
        """Fulfil what controllers have written. What cannot be done is printed on stderr, and asked for again."""
        try:
            data = os.read(self.end, _READ_BYTES)
        except BlockingIOError:
            return
        for line in self._lines.feed(data):
            if isinstance(line, BadLineError):
                sys.stderr.write(f"a line of a controller's could not be read: {line}\n")
                continue
            verb, _, namespace = line.decode(errors="replace").partition(" ")
            try:
                if verb == ADD:
                    self._add(check_namespace(namespace))
                elif verb == FORGET:
                    self._forget(namespace)
            except (FlusterError, OSError) as error:
                sys.stderr.write(f"the server's users of namespace {namespace!r} are as they were: {error}\n")

    def _add(self, namespace: str) -> None:
        self._server.add_namespace(namespace)
        if namespace not in self._given:
            self._added.add(namespace)
            self._note()
        self._write(namespace)  # last: it says that all else is done

    def _forget(self, namespace: str) -> None:
        """Its users stay until the next start: they may do nothing that another user would see."""
        (self._folder / f"{namespace}.json").unlink(missing_ok=True)
        self._added.discard(namespace)
        self._note()

    def _note(self) -> None:
        write_private(self._file, json.dumps(sorted(self._added)) + "\n")
