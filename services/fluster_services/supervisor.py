"""`python -m fluster_services.supervisor`: a cluster on this machine, for its owner.

The owner writes a LocalSetup as one line to standard input and reads a LocalStarted as one line from standard output.
Standard input is the leash: when it ends, because the owner closed it or died in whatever way, everything ends. A daemon
that dies is started again, on the same port and the same store, so that clients and actors go on without being told. So is
a server whose disk was full, once there is room.
Only a worker that was asked to drain stays away.

Single-threaded, without an event loop: the daemons are forked from here, with everything imported that several of them use.
That takes most of the start: it is done while the server, and then the controllers, come up, and nothing that takes long is
imported above.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fluster.json_lines import Lines, encoded
from fluster.local_setup import ADDRESS_FILE, LocalSetup, LocalStarted
from fluster_bus.core.errors import FlusterError, InvalidMessageError
from fluster_bus.core.roles import MAX_PAYLOAD_BYTES, Role
from fluster_bus.running.linux_calls import become_subreaper, set_process_name
from fluster_bus.server import MIN_FREE_BYTES, EmbeddedServer
from fluster_services import cluster_files
from fluster_services.config import LocalLimits
from fluster_services.forking import import_kept, run_and_exit
from fluster_services.local_daemons import FOR_ALL, FOR_VMS, FOR_WORKERS, Daemon, LocalDaemons, read_limits
from fluster_services.local_users import AddedUsers, added_before
from fluster_services.worker.linux.killing import kill_descendants

_LEAVE_TIMEOUT_S, _VMS_LEAVE_TIMEOUT_S = 5.0, 15.0
_SERVER_PAUSE_S = 5.0  # before it is tried again to start a server that could not be
_LOOK_AT_DISK_S = 2.0
_MAX_LINE_BYTES = 65_536  # of what a daemon says while it starts


class DiskRecovery:
    """Tells when a nats-server is to be started anew: a stream that it could not write once stays closed until then."""

    def __init__(self) -> None:
        self._was_full = False

    def observe(self, free_bytes: int) -> bool:
        """True once there is room again, after a time in which the largest message would not have found any."""
        if free_bytes < MAX_PAYLOAD_BYTES:
            self._was_full = True
        elif self._was_full and free_bytes >= MIN_FREE_BYTES:
            self._was_full = False
            return True
        return False


@dataclass
class Supervisor:
    """The daemons of one cluster, and the server below them."""

    setup: LocalSetup
    limits: LocalLimits
    store_dir: Path
    server: EmbeddedServer
    daemons: list[Daemon] = field(default_factory=list)
    server_restart_at: float | None = None
    disk_recovery: DiskRecovery = field(default_factory=DiskRecovery)

    def __post_init__(self) -> None:
        self.life_end, self._life = os.pipe()  # a holder of the first reads the end of this process
        self._wake_end, self._wake = os.pipe()
        os.set_blocking(self._wake_end, False)
        os.set_blocking(self._wake, False)
        self._selector = selectors.DefaultSelector()
        self._users = AddedUsers(self.server, self.store_dir, self.setup.namespaces)
        self._kinds = LocalDaemons(self.setup, self.limits, self.store_dir, self.server, self._users.wishes)

    # ---- starting ---------------------------------------------------------------------------------------

    def start(self, leash: int) -> str:
        """Start everything; the operator's address once requests are answered.

        Raises FlusterError, also when the leash ends meanwhile.
        """
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # the wake-up pipe tells
        become_subreaper()  # of keepers whose worker died, so that it knows when all are gone
        deadline = time.monotonic() + self.setup.start_timeout_s
        self.server.start(timeout_s=self.setup.start_timeout_s, meanwhile=lambda: import_kept(*FOR_ALL))
        self._users.write_all()
        ready = self._fork_all(self._kinds.controller(number) for number in range(self.setup.controllers))
        if self.setup.backend is not None:
            import_kept(*FOR_VMS)
            ready += self._fork_all([self._kinds.vms()])
        else:
            import_kept(*FOR_WORKERS)  # while controllers import what is theirs
            ready += self._fork_all(self._kinds.worker(number) for number in range(self.setup.workers))
        for daemon, ready_fd in ready:
            self._wait_ready(daemon, ready_fd, leash, deadline)
        return self.server.credentials(Role.OPERATOR).to_url()

    def _wait_ready(self, daemon: Daemon, ready_fd: int, leash: int, deadline: float) -> None:
        """Return when it says an empty line; what it says before is passed on."""
        lines, part = Lines(_MAX_LINE_BYTES), b"\n"
        with selectors.DefaultSelector() as selector, os.fdopen(ready_fd, "rb", buffering=0) as told:
            selector.register(told, selectors.EVENT_READ)
            selector.register(leash, selectors.EVENT_READ)
            while events := selector.select(max(0.0, deadline - time.monotonic())):
                if leash in (key.fd for key, _ in events):
                    raise FlusterError("the owner is gone")
                part = told.read(4096)
                for line in lines.feed(part):
                    if not line:
                        return
                    if isinstance(line, bytes):
                        _say(LocalStarted(progress=line.decode()))
                if not part:
                    break
        late = f"was not ready within {self.setup.start_timeout_s:g} s (start_timeout)"
        how = "could not be started" if not part else late
        raise FlusterError(f"{daemon.title or daemon.name} {how}: {self._last_words(daemon)}")

    def _last_words(self, daemon: Daemon) -> str:
        for suffix in ("err", "log"):
            file = self._log_file(daemon, suffix)
            lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
            if lines:
                return lines[-1]
        return f"see {self._log_file(daemon, 'log')}"

    def _log_file(self, daemon: Daemon, suffix: str) -> Path:
        return self.store_dir / "logs" / f"{daemon.name}.{suffix}"

    def _fork_all(self, daemons: Iterable[Daemon]) -> list[tuple[Daemon, int]]:
        """Start them; returns each with the descriptor on which it says that it is ready."""
        begun = []
        for daemon in daemons:
            self.daemons.append(daemon)
            begun.append((daemon, self._fork_and_ask(daemon)))
        return begun

    def _fork_and_ask(self, daemon: Daemon) -> int:
        """Start a daemon; returns the descriptor on which it says that it is ready."""
        ready_end, ready = os.pipe()
        self._fork(daemon, ready)
        os.close(ready)
        return ready_end

    def _fork(self, daemon: Daemon, ready: int | None) -> None:
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: self._become(daemon, ready))
        daemon.on_start(pid, time.monotonic())

    def _become(self, daemon: Daemon, ready: int | None) -> None:
        """In the child: be the daemon, holding nothing of the supervisor but the pipe that tells its end."""
        _show(daemon.name.partition("-")[0])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        # Of wishes none but controllers: what tasks are forked from must not hold it.
        wishes = (self._users.end,) if daemon.has_wishes else (self._users.end, self._users.wishes)
        for descriptor in (self._life, self._wake, self._wake_end, *wishes):
            os.close(descriptor)
        errors = os.open(self._log_file(daemon, "err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDWR)
        for source, target in ((null, 0), (errors, 1), (errors, 2)):
            os.dup2(source, target)
        os.close(errors)
        os.close(null)
        daemon.body(ready, self.life_end)

    # ---- watching ---------------------------------------------------------------------------------------

    def watch(self, leash: int) -> None:
        """Start again what dies, until the leash ends or SIGTERM comes."""
        self._selector.register(leash, selectors.EVENT_READ, "leash")
        self._selector.register(self._wake_end, selectors.EVENT_READ, "signal")
        self._selector.register(self.server, selectors.EVENT_READ, "server")
        self._selector.register(self._users.end, selectors.EVENT_READ, "wishes")
        while True:
            for key, _ in self._selector.select(self._pause()):
                if key.data == "leash" and not os.read(leash, 4096):
                    return
                if key.data == "signal" and self._on_signal():
                    return
                if key.data == "wishes":
                    self._users.on_wishes()
                if key.data == "server":
                    self._selector.unregister(key.fileobj)
                    self.server_restart_at = time.monotonic()
            self._look_at_disk()
            self._restart_due()

    def _look_at_disk(self) -> None:
        try:
            free_bytes = self.server.free_bytes()
        except OSError as error:
            sys.stderr.write(f"the server's folder cannot be looked at: {error}\n")
            return
        if self.disk_recovery.observe(free_bytes) and self.server_restart_at is None:
            sys.stderr.write("nats-server is started again, now that its disk has room\n")
            self._selector.unregister(self.server)
            self.server.stop()
            self.server_restart_at = time.monotonic()

    def _pause(self) -> float:
        times = [daemon.restart_at for daemon in self.daemons if daemon.restart_at is not None]
        if self.server_restart_at is not None:
            times.append(self.server_restart_at)
        return max(0.0, min([_LOOK_AT_DISK_S, *(moment - time.monotonic() for moment in times)]))

    def _on_signal(self) -> bool:
        """Take in who ended; True when this process is asked to leave."""
        numbers = os.read(self._wake_end, 4096)
        self._reap()
        return any(number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for number in numbers)

    def _reap(self) -> None:
        """Take in every child that ended: daemons, and keepers whose worker is gone. The server's own handle copes."""
        now = time.monotonic()
        while ended := _next_ended():
            pid, status = ended
            for daemon in self.daemons:
                if daemon.pid == pid:
                    daemon.on_end(status, now)

    def _restart_due(self) -> None:
        now = time.monotonic()
        if self.server_restart_at is not None and self.server_restart_at <= now:
            self._restart_server(now)
        for daemon in self.daemons:
            if daemon.restart_at is not None and daemon.restart_at <= now:
                self._fork(daemon, None)

    def _restart_server(self, now: float) -> None:
        try:
            self.server.start()
        except FlusterError as error:
            sys.stderr.write(f"nats-server could not be started again: {error}\n")
            self.server_restart_at = now + _SERVER_PAUSE_S
        else:
            self.server_restart_at = None
            self._selector.register(self.server, selectors.EVENT_READ, "server")

    # ---- ending -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End everything, and return when no process is left."""
        for daemon in self.daemons:
            if daemon.pid:
                os.kill(daemon.pid, signal.SIGTERM)
        # The end of this pipe stops the keepers, and with them the tasks.
        os.close(self._life)
        self._wait_until(lambda: not any(daemon.pid for daemon in self.daemons), self._kill_daemons)
        # Not earlier: daemons that leave have something to send to it.
        self.server.stop()
        # Keepers and templates that are stopped, too; what they leave when they die comes to this process next.
        self._wait_until(_no_children, kill_descendants)

    def _kill_daemons(self) -> None:
        for daemon in self.daemons:
            if daemon.pid:
                os.kill(daemon.pid, signal.SIGKILL)

    def _wait_until(self, condition: Callable[[], bool], by_force: Callable[[], object]) -> None:
        """Wait for children to end; `by_force` is called now and then when that takes too long."""
        timeout_s = _LEAVE_TIMEOUT_S if self.setup.backend is None else _VMS_LEAVE_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        while True:
            self._reap()
            if condition():
                return
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_end, selectors.EVENT_READ)
                if selector.select(max(0.0, deadline - time.monotonic())):
                    os.read(self._wake_end, 4096)
            if time.monotonic() >= deadline:
                by_force()
                deadline = time.monotonic() + _LEAVE_TIMEOUT_S


def _next_ended() -> tuple[int, int] | None:
    """A child that ended, taken in, with its status; None when there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _no_children() -> bool:
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return False
        except ChildProcessError:
            return True


def _read_setup(leash: int) -> LocalSetup:
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(leash, 65_536)
        if not part:
            raise InvalidMessageError("the owner was gone before it said what to start")
        text += part
    return LocalSetup.from_json(text)


def _make(folder: Path) -> None:
    try:
        for each in (folder.parent, folder):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise FlusterError(
            f"the store folder {folder.parent} cannot be used: {error.filename}: {error.strerror}; make it a folder that "
            "can be written to, or choose another"
        ) from error


@contextlib.contextmanager
def _held(store_dir: Path) -> Iterator[None]:
    """Keep the store from other clusters while this process lives. Raises FlusterError when another one has it."""
    with (store_dir / cluster_files.LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            # Not inherited by daemons, which may outlive this process a little.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in {errno.EACCES, errno.EAGAIN}:
                raise
            file.seek(0)
            raise FlusterError(
                f"the store folder {store_dir} is in use by another cluster (process {file.read().strip() or 'unknown'}): end that "
                "one, or choose another folder"
            ) from error
        file.truncate(0)
        file.write(f"{os.getppid()}\n")
        file.flush()
        yield


def _say(started: LocalStarted) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner is gone, which the leash tells as well
        os.write(sys.stdout.fileno(), encoded(asdict(started)))


def _show(kind: str) -> None:
    """Have ps and top say what this process is: all of them have the supervisor's command line."""
    set_process_name(f"fluster-{kind}")


def main() -> None:
    leash = sys.stdin.fileno()
    _show("supervisor")
    with ExitStack() as stack:
        try:
            setup = _read_setup(leash)
            if setup.store_dir is None:
                # Not a TemporaryDirectory: every process that is forked from here would remove it at its own exit.
                store_dir = Path(tempfile.mkdtemp(prefix=cluster_files.PREFIX))
                stack.callback(shutil.rmtree, store_dir, ignore_errors=True)
            else:
                store_dir = Path(setup.store_dir)
            _make(store_dir / "logs")
            stack.enter_context(_held(store_dir))
            stack.callback((store_dir / ADDRESS_FILE).unlink, missing_ok=True)  # an owner that was killed left it
            limits = read_limits(setup)
            namespaces = list(dict.fromkeys((*setup.namespaces, *added_before(store_dir))))
            server = EmbeddedServer(store_dir / "nats", setup.port, namespaces=namespaces, bounds=limits.bounds)
            supervisor = Supervisor(setup, limits, store_dir, server)
            stack.callback(supervisor.stop)
            address = supervisor.start(leash)
        except (FlusterError, OSError) as error:
            _say(LocalStarted(error=str(error)))
            return
        _say(LocalStarted(address=address, store_dir=str(store_dir)))
        cluster_files.sweep(but=store_dir)  # not earlier: the owner waits no longer for it
        supervisor.watch(leash)


if __name__ == "__main__":
    main()
