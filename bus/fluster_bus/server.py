"""A nats-server of one's own: loopback only, fresh credentials, gone when its owner is gone."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import ServerStartError
from fluster_bus.core.roles import (
    DEFAULT_NAMESPACE,
    MAX_PAYLOAD_BYTES,
    Role,
    User,
    users,
)
from fluster_bus.core.stream_bounds import NamespaceBounds, store_bytes
from fluster_bus.direct.pulse import SERVER_PINGS
from fluster_bus.server_configuration import accounts_configuration
from fluster_bus.server_process import (
    LOOPBACK,
    PORT_ATTEMPTS,
    ServerProcess,
    end_of_file,
    find_binary,
    free_port,
    last_word,
    private_file,
    status_text,
)
from fluster_bus.server_sections import quoted

if TYPE_CHECKING:
    from fluster_bus.trust.authority import Authority

MIN_STORE_LIMIT_BYTES = 16 << 30  # of a store for which no other limit was given

MIN_FREE_BYTES = 32 << 20
_MEMORY_LIMIT_BYTES = 256 << 20
_LOG_LIMIT_BYTES, _LOGS_KEPT = 4 << 20, 2
_START_TIMEOUT_S = 30.0  # a large store takes a while to read
_STOP_GRACE_S = 5.0


class EmbeddedServer:
    """A nats-server with JetStream for a cluster on this machine. Blocking, not thread-safe.

    It listens on loopback only and knows one user for each role, with passwords that are made anew for each
    EmbeddedServer. Starting it again after it died or was stopped keeps port, store and passwords.

    On Linux it dies with the *thread* that called `start`, however that ends; so start it from a thread that lives as
    long as it should. Elsewhere it outlives an owner that is killed, and only `stop` ends it.
    """

    def __init__(
        self,
        store_dir: Path | None = None,
        port: int = 0,
        *,
        namespaces: Sequence[str] = (DEFAULT_NAMESPACE,),
        store_limit_bytes: int | None = None,
        bounds: NamespaceBounds | None = None,
        authority: Authority | None = None,
    ) -> None:
        """Nothing is started or written yet. Without `store_dir` a folder is made, and removed by `close`.

        With an `authority` it takes the users that this issues, else those of `credentials`. The store may grow to 16 GiB, or to
        what the namespaces need by their `bounds`: 1 GiB for each, and one more, where none is given.

        Raises InvalidNameError for a name that cannot be a namespace.
        """
        self._given_dir = store_dir
        self._store_dir: Path | None = None
        self._given_port = port
        self._port = port
        self._namespaces = tuple(namespaces)
        self._authority = authority
        self._passwords = {user: secrets.token_urlsafe(32) for user in users(self._namespaces)}
        needed = store_bytes(len(self._namespaces), bounds)
        self._store_limit_bytes = store_limit_bytes or max(MIN_STORE_LIMIT_BYTES, needed)
        self._process: ServerProcess | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- who and where ----------------------------------------------------------------------------------

    @property
    def store_dir(self) -> Path:
        """Where everything of this server lies. Known once it was started."""
        if self._store_dir is None:
            raise RuntimeError("the embedded server has no folder yet: call start() first")
        return self._store_dir

    @property
    def log_file(self) -> Path:
        return self.store_dir / "nats-server.log"

    def free_bytes(self) -> int:
        """The room on the disk of its folder. Raises OSError when that was removed."""
        return shutil.disk_usage(self.store_dir).free

    @property
    def port(self) -> int:
        """Where it listens. Known once it was started, and then for good."""
        if self._port == 0:
            raise RuntimeError("the embedded server has no port yet: call start() first")
        return self._port

    @property
    def pid(self) -> int | None:
        """The process, None when it does not run."""
        return self._process.pid if self._process is not None and self.poll() is None else None

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those whose users it lets in."""
        return self._namespaces

    def add_namespace(self, namespace: str) -> None:
        """Let in the users of one more namespace, soon after this returns. Connected users stay connected.

        Raises InvalidNameError, and ServerStartError when its configuration cannot be written: then all is as it was.
        """
        if namespace in self._namespaces:
            return
        before = self._namespaces, self._passwords
        namespaces = (*self._namespaces, namespace)
        passwords = {user: secrets.token_urlsafe(32) for user in users(namespaces)} | self._passwords
        self._namespaces, self._passwords = namespaces, passwords
        if self._store_dir is None:
            return  # it is written when it is started
        try:
            with _explained(self._given_dir):
                self._write_configuration()
        except ServerStartError:
            self._namespaces, self._passwords = before
            raise
        if self._process is not None and self.poll() is None:
            self._process.reload()

    def credentials(self, role: Role, namespace: str | None = None) -> BusAddress:
        """The address for a user of this role; client and job need the namespace that they are confined to."""
        user = User(role, namespace)
        if user not in self._passwords:
            known = ", ".join(self._namespaces)
            raise ValueError(f"namespace {namespace!r} is not declared at this server, which has {known}")
        return BusAddress(f"nats://{LOOPBACK}:{self.port}", user.name, self._passwords[user])

    # ---- life -------------------------------------------------------------------------------------------

    def start(self, *, timeout_s: float = _START_TIMEOUT_S, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Return when clients can connect. Does nothing when it runs already; else `meanwhile` is called as it comes up.

        Raises ServerStartError with the reason and the remedy; then nothing runs.
        """
        if self._process is not None and self.poll() is None:
            return
        binary = find_binary()
        with _explained(self._given_dir):
            self._prepare_store()
        deadline = time.monotonic() + timeout_s
        for attempt in range(PORT_ATTEMPTS):
            free = self._port == 0
            if free:
                self._port = free_port()
            try:
                self._launch(binary, timeout_s, deadline, meanwhile if attempt == 0 else lambda: None)
            except _PortBusyError as error:
                if not free:
                    raise
                self._port = 0
                if attempt == PORT_ATTEMPTS - 1:
                    raise ServerStartError(f"nats-server found no free port in {PORT_ATTEMPTS} attempts") from error
            else:
                return

    def _prepare_store(self) -> None:
        if self._store_dir is None:
            if self._given_dir is None:
                self._store_dir = Path(tempfile.mkdtemp(prefix="fluster-bus-")).resolve()
            else:
                self._given_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._store_dir = self._given_dir.resolve()
        free_bytes = self.free_bytes()
        if free_bytes < MIN_FREE_BYTES:
            raise ServerStartError(
                f"the disk of the store folder {self._store_dir} is full ({free_bytes >> 20} MiB free): "
                "make room, or choose another folder"
            )

    def _launch(self, binary: Path, timeout_s: float, deadline: float, meanwhile: Callable[[], object]) -> None:
        with _explained(self._given_dir):
            arguments = ["--config", str(self._write_configuration())]
            output = self.store_dir / "nats-server.out"
            log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
            lock = self._lock_store()
            try:
                self._release()
                process = self._process = ServerProcess(binary, arguments, self.store_dir / "ports", output, lock)
            finally:
                # The server holds it from here on, and no longer than it lives.
                os.close(lock)
        try:
            meanwhile()
            ready = process.wait_ready(deadline)
        except BaseException:  # Ctrl-C, say
            self.stop()
            raise
        if ready:
            return
        late = time.monotonic() >= deadline
        code = process.terminate(_STOP_GRACE_S) if late else process.wait(_STOP_GRACE_S)
        self._release()
        ended = (
            f"was not ready within {timeout_s:g} s" if late else f"ended with {status_text(code)} before it was ready"
        )
        raise self._failure(ended, last_word(end_of_file(self.log_file, log_start) + end_of_file(output, 0)))

    def _failure(self, ended: str, last: str) -> ServerStartError:
        if "address already in use" in last:
            return _PortBusyError(
                f"port {self._port} is in use by another program: stop that one, or choose another port "
                f"(nats-server: {last})"
            )
        return ServerStartError(
            f"nats-server {ended}; its last word was {last or 'none'!r}, its log is {self.log_file}"
        )

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended: for a selector, not for reading."""
        return self._started().fileno()

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._started().poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, when it has ended. Raises TimeoutError."""
        return self._started().wait(timeout_s)

    def _started(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("the embedded server was not started: call start() first")
        return self._process

    def stop(self, *, grace_s: float = _STOP_GRACE_S) -> None:
        """End it, by force after `grace_s`. What it stored stays, and `start` goes on from there."""
        if self._process is not None and self.poll() is None:
            self._process.terminate(grace_s)
        self._release()

    def close(self) -> None:
        """End it, and remove its folder if it was a temporary one."""
        self.stop()
        if self._given_dir is None and self._store_dir is not None:
            shutil.rmtree(self._store_dir)
            self._store_dir = None

    def _release(self) -> None:
        if self._process is not None:
            self._process.release()

    # ---- files ------------------------------------------------------------------------------------------

    def _write_configuration(self) -> Path:
        path = self.store_dir / "nats-server.conf"
        draft = path.with_suffix(".draft")
        with private_file(draft) as file:
            file.write(self._configuration().encode())
        draft.replace(path)  # a server that runs may read it at any moment
        return path

    def _configuration(self) -> str:
        return (
            _CONFIGURATION.format(
                listen=quoted(f"{LOOPBACK}:{self.port}"),
                max_payload=MAX_PAYLOAD_BYTES,
                pings=SERVER_PINGS,
                store_dir=quoted(str(self.store_dir)),
                store_limit=self._store_limit_bytes,
                memory_limit=_MEMORY_LIMIT_BYTES,
                log_file=quoted(str(self.log_file)),
                log_limit=_LOG_LIMIT_BYTES,
                logs_kept=_LOGS_KEPT,
            )
            + self._trusted()
        )

    def _trusted(self) -> str:
        if self._authority is not None:
            from fluster_bus.trust.authority import trust_configuration

            return trust_configuration(self._authority, self.store_dir / "accounts")
        return accounts_configuration(
            self._namespaces, lambda user: quoted(self._passwords[user]), store_bytes=self._store_limit_bytes
        )

    def _lock_store(self) -> int:
        """A descriptor that holds the folder's lock: two servers on one store destroy it, and do not check."""
        import fcntl

        descriptor = os.open(self.store_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ServerStartError(
                f"another nats-server uses the store folder {self.store_dir}: stop it, or choose another folder"
            ) from error
        return descriptor


class _PortBusyError(ServerStartError):
    """Another program listens there."""


@contextmanager
def _explained(store_dir: Path | None) -> Iterator[None]:
    """Turns what the system says about a folder or a program into one line with the remedy."""
    try:
        yield
    except OSError as error:
        where = error.filename or store_dir or tempfile.gettempdir()
        raise ServerStartError(
            f"nats-server cannot be started: {where}: {error.strerror}; make the store folder writable with room on "
            "its disk, or choose another"
        ) from error


_CONFIGURATION = """\
# Written anew at each start, and for each namespace that is added.
listen: {listen}
max_payload: {max_payload}
{pings}
jetstream {{
  store_dir: {store_dir}
  max_file_store: {store_limit}
  max_memory_store: {memory_limit}
  # sync_interval is left at the server's default of two minutes: killing the server loses nothing, only a power failure
  # takes what was acknowledged last, and with it the processes that a cluster on one machine is made of.
}}

log_file: {log_file}
log_size_limit: {log_limit}
log_max_num: {logs_kept}

# Passwords stand here as they are: this file is its owner's alone, they are random, used nowhere else and made anew for
# each cluster, so a hash protects nothing; and the server would take about 0.1 s to check one at each connect.
"""
