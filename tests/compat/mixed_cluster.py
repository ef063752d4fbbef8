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
from fluster_bus.roles import DEFAULT_NAMESPACE, Role, User
from fluster_bus.server import EmbeddedServer
from tests.compat.releases import Release
from tests.system.processes import Family
from tests.waiting import wait_until

_CLIENT = Path(__file__).with_name("client_program.py")
_PATIENCE_S = 120
# Nothing is judged for its silence: daemons are away for as long as it takes to start others.
_TIMING = {"FLUSTER_HEARTBEAT_S": "0.2", "FLUSTER_FENCE_AFTER_S": "60", "FLUSTER_WORKER_TIMEOUT_S": "120"}


class MixedCluster:
    """A server, and daemons that are started with the settings that they have in production."""

    def __init__(self, folder: Path, family: Family) -> None:
        self._folder = folder
        self._family = family
        self._server = EmbeddedServer(folder / "nats")
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # {name: the daemon}
        self._starts = 0

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self._running):
            self.end(name, signal.SIGKILL)
        self._server.close()  # what the workers left is ended with the family

    def connect(self) -> Cluster:
        """The client of this tree, as the test itself is."""
        return Cluster(self._server.credentials(Role.OPERATOR))

    # ---- daemons ----------------------------------------------------------------------------------------

    def start_controller(self, release: Release, name: str) -> None:
        """Return when it answers, or stands by for another."""
        address = self._server.credentials(Role.SERVICE).to_url()
        self._start("controller", name, release, FLUSTER_CLUSTER_ADDRESS=address, FLUSTER_CONTROLLER_ID=name)

    def start_worker(self, release: Release, name: str) -> None:
        """Return when it takes offers."""
        job = User(Role.JOB, DEFAULT_NAMESPACE)
        password = self._server.credentials(Role.JOB, DEFAULT_NAMESPACE).password
        assert password is not None
        self._start(
            "worker",
            name,
            release,
            FLUSTER_CLUSTER_ADDRESS=self._server.credentials(Role.WORKER).to_url(),
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
        address = self._server.credentials(Role.CLIENT, DEFAULT_NAMESPACE).to_url()
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

    def _environment(self, release: Release, **more: str) -> dict[str, str]:
        """Nothing of a cluster of the test's own."""
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("FLUSTER_")}
        return {**inherited, **self._family.variables, **release.variables(), **more}
