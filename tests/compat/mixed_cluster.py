"""A cluster each of whose parts is of the release that the test says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fluster.cluster import Cluster
from fluster_bus.access.address import BusAddress
from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role, User
from tests.compat.releases import Release
from tests.system.processes import Family
from tests.waiting import wait_until

_CLIENT, _SERVER = (Path(__file__).with_name(f"{part}_program.py") for part in ("client", "server"))
_PATIENCE_S = 120
# Nothing is judged for its silence: daemons are away for as long as it takes to start others.
_TIMING = {"FLUSTER_HEARTBEAT_S": "0.2", "FLUSTER_FENCE_AFTER_S": "60", "FLUSTER_WORKER_TIMEOUT_S": "120"}


class MixedCluster:
    """A server, and daemons that are started with the settings that they have in production."""

    def __init__(self, folder: Path, family: Family) -> None:
        self._folder = folder
        self._family = family
        self._server: subprocess.Popen[str] | None = None
        self._addresses: dict[str, str] = {}  # {role: the URL of a user that has it}
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # {name: the daemon}
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self.end(name, signal.SIGKILL)
        if self._server is not None:
            self._server.communicate(timeout=_PATIENCE_S)  # what the workers left is ended with the family

    def address(self, role: Role) -> str:
        """Of a user of the server, which has been started."""
        return self._addresses[role]

    def connect(self) -> Cluster:
        """The client of this tree, as the test itself is."""
        return Cluster(self.address(Role.OPERATOR))

    def start_server(self, release: Release) -> None:
        """Return when it takes connections; it is configured as that release does."""
        self._server = subprocess.Popen(
            [sys.executable, str(_SERVER), str(self._folder / "nats")],
            env=self._environment(release),
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._addresses = json.loads(self._server.stdout.readline())

    # ---- daemons ----------------------------------------------------------------------------------------

    def start_controller(self, release: Release, name: str) -> None:
        """Return when it answers, or stands by for another."""
        address = self.address(Role.SERVICE)
        self._start("controller", name, release, FLUSTER_CLUSTER_ADDRESS=address, FLUSTER_CONTROLLER_ID=name)

    def start_worker(self, release: Release, name: str) -> None:
        """Return when it takes offers."""
        job = User(Role.JOB, DEFAULT_NAMESPACE)
        password = BusAddress.parse(self.address(Role.JOB)).password
        assert password is not None
        self._start(
            "worker",
            name,
            release,
            FLUSTER_CLUSTER_ADDRESS=self.address(Role.WORKER),
            FLUSTER_WORKER_ID=name,
            FLUSTER_STATE_DIR=str(self._folder / name),
            FLUSTER_CPUS="8",
            FLUSTER_MEMORY="32GB",
            FLUSTER_ENFORCE_LIMITS="never",
            **{job.password_variable: password},
        )

    def _start(self, kind: str, name: str, release: Release, **settings: str) -> None:
        self._starts += 1
        log = self._folder / f"{self._starts}-{release.name}-{name}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", f"fluster_services.{kind}"],
                env=self._environment(release, **_TIMING, **settings),
                cwd=self._folder,
                stderr=stderr,
            )
        self._running[name] = process
        wait_until(lambda: "is ready" in log.read_text() or process.poll() is not None, _PATIENCE_S, log.read_text)
        assert process.poll() is None, log.read_text()

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        """Have a daemon leave, and return when it has."""
        process = self._running.pop(name)
        process.send_signal(number)
        process.wait(_PATIENCE_S)

    # ---- clients ----------------------------------------------------------------------------------------

    def run_client(self, release: Release) -> dict[str, Any]:
        """What client_program.py, run by that release, says that it got."""
        address = self.address(Role.CLIENT)
        done = subprocess.run(
            [sys.executable, str(_CLIENT)],
            env=self._environment(release, FLUSTER_CLUSTER_ADDRESS=address),
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def run_command(self, release: Release, *words: str) -> None:
        """Have `fluster` of a release do something, as the operator."""
        program = [sys.executable, "-c", "from fluster.cli import main; main()"]
        environment = self._environment(release, FLUSTER_CLUSTER_ADDRESS=self.address(Role.OPERATOR))
        done = subprocess.run(
            [*program, *words],
            env=environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr

    def _environment(self, release: Release, **more: str) -> dict[str, str]:
        """Nothing of a cluster of the test's own."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("FLUSTER_")}
        return {**inherited, **self._family.variables, **release.variables(), **more}
