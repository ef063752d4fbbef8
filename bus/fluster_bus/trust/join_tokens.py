"""Join tokens: one is text that a machine shows to become a worker. It holds the credentials of a user who may do nothing else."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fluster_bus.access.address import BusAddress, write_private
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import CredentialsError, FlusterError
from fluster_bus.core.json_types import JsonObject
from fluster_bus.core.names import check_name, check_namespace
from fluster_bus.messages.workers import JoinReply, JoinRequest

_PREFIX = "fluster-join-"
_MAX_BYTES = 1 << 16
_WORKER_FILE, _KEYS_FILE = "worker.creds", "keys.json"
_ANSWERED_S = 30.0


@dataclass(frozen=True)
class JoinToken:
    """A join token, as it is handed to those that start workers. Its text is a secret."""

    address: BusAddress  # with the credentials of the token's own user, who may only ask to join
    namespaces: tuple[str, ...]  # for which it is good

    @property
    def token_id(self) -> str:
        """By which people speak of it; no secret."""
        return self.address.user or ""

    def to_text(self) -> str:
        """One line, for `parse`."""
        values = {**self.address.values(), "namespaces": self.namespaces}
        return _PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).rstrip(b"=").decode("ascii")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The token that `text` is, or that stands in the file of that name. Raises CredentialsError, which does not show it."""
        line = text.strip()
        if not line.startswith(_PREFIX):
            line = _read(Path(line))
        try:
            data = line.removeprefix(_PREFIX).encode("ascii")
            values = json.loads(base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4)))
            namespaces = tuple(check_namespace(each) for each in values.pop("namespaces"))
            token = cls(BusAddress(**values), namespaces)
            check_name("join token", token.token_id)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, FlusterError) as error:
            raise CredentialsError("the join token is damaged: give it as `fluster token create` wrote it") from error
        return token


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not a path"
        raise CredentialsError(
            f"what is given as a join token is none, and as a file it cannot be read ({why}): take what `fluster token create` printed"
        ) from error
    if not text.startswith(_PREFIX):
        raise CredentialsError(f"the file {path} holds no join token: take what `fluster token create` wrote")
    if os.name == "posix" and mode & 0o077:
        raise CredentialsError(f"others may read the join token in {path} (mode {mode:o}): run `chmod 600 {path}`")
    return text


class JoinedFolder:
    """What a worker keeps of having joined, in files that only its owner can read: its keys, and what was signed for them."""

    def __init__(self, folder: Path) -> None:
        """That in `folder`, which is made when there is something to keep."""
        self._folder = folder

    @property
    def worker_file(self) -> Path:
        """The worker's credentials, if it has joined."""
        return self._folder / _WORKER_FILE

    def job_files(self) -> Mapping[str, Path]:
        """{namespace: the credentials of its jobs}"""
        if not self.worker_file.exists():
            return {}
        namespaces = BusAddress.parse(str(self.worker_file)).namespaces
        return {each: self._job_file(each) for each in namespaces}

    def _job_file(self, namespace: str) -> Path:
        return self._folder / f"job-{namespace}.creds"

    def keys(self, namespaces: Sequence[str]) -> tuple[Key, dict[str, Key]]:
        """The worker's key and those of its jobs, made once: asked again, as the answer was lost, it asks for the same.

        Raises CredentialsError.
        """
        file = self._folder / _KEYS_FILE
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            known: JsonObject = json.loads(file.read_bytes()) if file.exists() else {}
            worker = Key(known["worker"]) if "worker" in known else Key.generate(KeyKind.USER)
            kept = {name: Key(seed) for name, seed in known.get("jobs", {}).items()}
        except (ValueError, TypeError, AttributeError, OSError) as error:
            raise CredentialsError(f"the file {file} cannot be used: remove {self._folder}, and join anew") from error
        jobs = {name: kept.get(name) or Key.generate(KeyKind.USER) for name in namespaces}
        seeds = {name: key.seed for name, key in {**kept, **jobs}.items()}
        write_private(file, json.dumps({"worker": worker.seed, "jobs": seeds}) + "\n")
        return worker, jobs

    def keep(self, address: BusAddress, reply: JoinReply, worker: Key, jobs: Mapping[str, Key]) -> None:
        """Write what was signed. Raises CredentialsError when it was signed for other keys, AddressError."""
        if reply.jobs.keys() != jobs.keys():
            raise CredentialsError("the answer is not for the namespaces that were asked for: join again")
        signed = {worker.public: reply.worker, **{key.public: reply.jobs[name] for name, key in jobs.items()}}
        if any(read_user_token(token).public != public for public, token in signed.items()):
            raise CredentialsError("the answer is signed for other keys than those that were sent: join again")
        for name, key in jobs.items():
            _signed(address, reply.jobs[name], key).save(self._job_file(name))
        _signed(address, reply.worker, worker).save(self.worker_file)  # the last: with it the worker has joined


def _signed(address: BusAddress, token: str, key: Key) -> BusAddress:
    return replace(address, user=None, password=None, token=token, seed=key.seed, file=None)


async def join(token: JoinToken, worker_id: str, folder: JoinedFolder, namespaces: Sequence[str] = ()) -> None:
    """Exchange a join token for the credentials of that worker, for these namespaces or all of the token, and keep them in `folder`.

    Raises CredentialsError when the token has expired or was revoked, ServiceError with the code JOIN_REFUSED and the reason, ConnectError
    when no server answers, and RequestTimeoutError or NoRespondersError when no controller does.
    """
    worker, jobs = folder.keys(namespaces or token.namespaces)
    request = JoinRequest(
        worker_id=worker_id, key=worker.public, job_keys={name: key.public for name, key in jobs.items()}
    )
    bus = await Bus.connect(token.address, name=f"{worker_id}-joins")
    try:
        reply = await bus.ask(subjects.join(token.token_id), request, JoinReply, timeout_s=_ANSWERED_S)
    finally:
        await bus.close()
    folder.keep(token.address, reply, worker, jobs)
