"""A cluster whose parts are started, killed and started again by hand, with a timing of their own."""

import base64
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from fluster.cluster import Cluster
from fluster_bus.core.roles import Role
from fluster_bus.messages import Capacity, Namespace, WorkerId
from fluster_bus.messages.parts.resources import GIB
from fluster_bus.server import EmbeddedServer
from fluster_services.config import LOCAL_TIMING, Timing
from fluster_services.controller.controller import ControllerConfig
from fluster_services.worker.contract.config import WorkerConfig
from tests.system.processes import Family

DEFAULT = Namespace("default")


def scaled(timing: Timing, factor: float) -> Timing:
    """All that a fence is made of by one factor, so that what holds for the proportions of `timing` holds for these."""
    fields = ("heartbeat_s", "fence_after_s", "worker_timeout_s", "kill_grace_s")
    return dataclasses.replace(
        Timing(unschedulable_after_s=0.3), **{each: factor * getattr(timing, each) for each in fields}
    )


# Quick to judge; a machine that runs other things meanwhile may well be silent for a second.
QUICK = scaled(LOCAL_TIMING, 0.2)
# For those who come back in time: starting a daemon can take a while.
PATIENT = Timing(heartbeat_s=0.2, fence_after_s=30, worker_timeout_s=60, kill_grace_s=0.4, unschedulable_after_s=0.3)

LOG_SHOWN = 20_000  # characters of each daemon's log that a failed test shows

# The beginning of a daemon's program: its clocks may be off, as files say that are read each time.
CLOCKS = """
import base64, os, pickle, signal, sys, time
from pathlib import Path
if "FLUSTER_TEST_CLOCK" in os.environ:
    clock, right = Path(os.environ["FLUSTER_TEST_CLOCK"]), time.time
    time.time = lambda: right() + float(clock.read_text() or 0)
if "FLUSTER_TEST_SLEPT" in os.environ:
    slept, elapsed = Path(os.environ["FLUSTER_TEST_SLEPT"]), time.clock_gettime
    time.clock_gettime = lambda clock: elapsed(clock) + float(slept.read_text() or 0)
"""

_PROGRAM = f"""{CLOCKS}
config = pickle.loads(base64.b64decode(sys.argv[1]))
ready_fd, owner_fd, log_file = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
if type(config).__name__ == "ControllerConfig":
    from fluster_services.controller.__main__ import run_controller as run
else:
    from fluster_services.worker.__main__ import run_worker as run
run(config, ready_fd=ready_fd, owner_fd=owner_fd, log_file=log_file)
"""


class Daemons:
    """A server and what is started on it. Everything ends with the `with` block."""

    def __init__(self, folder: Path, family: Family, *, timing: Timing = PATIENT, cpu: float = 16) -> None:
        self.folder = folder
        self.family = family
        self.timing = timing
        self.cpu = cpu
        self.server = EmbeddedServer(folder / "nats")
        self.running: dict[str, subprocess.Popen[bytes]] = {}  # {name: the daemon}
        self.clocks: dict[str, Path] = {}  # {name: a file that says how many seconds the daemon's wall clock is off}
        self.sleeps: dict[str, Path] = {}  # {name: a file that says how many seconds its machine has slept}
        self._owner_end, self._owner = os.pipe()

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for name in self.running:  # pytest shows it with the test's error
                print(f"---- the end of {name}'s log\n{self.log(name)[-LOG_SHOWN:]}")
        os.close(self._owner)
        os.close(self._owner_end)
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.wait(60)
        self.server.close()
        self.family.wait_gone()

    @property
    def address(self) -> str:
        """For the operator."""
        return self.server.credentials(Role.OPERATOR).to_url()

    def connect(self) -> Cluster:
        return Cluster(self.address)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    # ---- daemons ----------------------------------------------------------------------------------------

    def start_controller(self, name: str = "controller", **fields: Any) -> None:
        """Start it, and return when it answers, or stands by for another that does; `fields` are of its configuration."""
        address = self.server.credentials(Role.SERVICE)
        config = ControllerConfig(address=address, namespaces=(DEFAULT,), timing=self.timing, controller_id=name)
        self._start(name, dataclasses.replace(config, **fields))

    def start_worker(self, name: str = "w1", **fields: Any) -> None:
        """Start it, and return when it takes offers; `fields` of its configuration are as given."""
        config = WorkerConfig(
            address=self.server.credentials(Role.SERVICE),
            worker_id=WorkerId(name),
            state_dir=self.folder / name,
            total=Capacity(cpu=self.cpu, memory=64 * GIB),
            job_credentials={DEFAULT: self.server.credentials(Role.JOB, DEFAULT)},
            timing=self.timing,
            working_dir=self.folder,
            python_path=tuple(sys.path),
        )
        self._start(name, dataclasses.replace(config, **fields))

    def _start(self, name: str, config: ControllerConfig | WorkerConfig) -> None:
        ready_end, ready = os.pipe()
        words = (base64.b64encode(pickle.dumps(config)).decode(), ready, self._owner_end, self.folder / f"{name}.log")
        self.running[name] = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *map(str, words)],
            env=self.family.environment(PYTHONPATH=os.pathsep.join(sys.path), **self.clock_environment(name)),
            pass_fds=(ready, self._owner_end),
        )
        os.close(ready)
        with os.fdopen(ready_end, "rb") as told:
            assert told.read(1), f"{name} did not start: {self.log(name)}"

    def clock_environment(self, name: str) -> dict[str, str]:
        """Where the clocks of that daemon stand, for a program that begins with CLOCKS."""
        files = (("FLUSTER_TEST_CLOCK", self.clocks), ("FLUSTER_TEST_SLEPT", self.sleeps))
        return {variable: str(of[name]) for variable, of in files if name in of}

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """End a daemon. With another signal than SIGKILL it may live on."""
        self.running[name].send_signal(number)
        if number is signal.SIGKILL:
            self.running.pop(name).wait()

    def kill_server(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.wait(60)

    def restart_server(self) -> None:
        """Kill the server, and start it again with what it has stored."""
        self.kill_server()
        self.server.start()

    def set_clock(self, name: str, off_s: float) -> None:
        """Set a wall clock that is in `clocks`, at once: a reader finds the old value or the new one."""
        written = self.clocks[name].with_suffix(".new")
        written.write_text(str(off_s))
        written.rename(self.clocks[name])


@pytest.fixture(name="cluster")
def operated(daemons: Daemons) -> Iterator[Cluster]:
    """The operator's connection to the `daemons` of the module that imports this."""
    with daemons.connect() as cluster:
        yield cluster
