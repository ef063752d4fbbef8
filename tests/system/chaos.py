"""What can happen to a cluster, each as one call: `Chaos`. And those who wait meanwhile: `Waits`."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from fluster import Cluster, FlusterError
from fluster.actors import ActorPool
from fluster_bus.access.address import BusAddress
from fluster_bus.core.roles import Role
from fluster_bus.messages import JobId
from fluster_services.worker.linux.cgroups import Enforcement
from tests.cable import Cable
from tests.system.daemons import Daemons
from tests.system.nursery import Nursery
from tests.system.small_disks import fill

# As small to the workers' timing as the usual ones are to theirs.
PINGS = {"FLUSTER_PING_INTERVAL_S": "0.4", "FLUSTER_PINGS_UNANSWERED": "2"}
CLOCKS = ("controllers", "w1", "w2")
DAYS_S = 8 * 86_400.0  # longer than records are kept
_WORKERS = ("w1", "w2")  # of which the first has a small disk, and the second a cable
_START_S = 90.0  # for a program to have its workers, on a busy machine

OWNER = """
import time
from fluster import Cluster, ResourceConfig, WorkerPool

pool = WorkerPool(Cluster(), 2, resources=ResourceConfig.with_cpu(0.5, memory="128MiB"))
pool.submit(int).result()
print("ready", flush=True)
while True:
    try:
        pool.submit(time.sleep, 0.05).result()
    except Exception:  # whatever the faults do to its calls: it is there to be killed, and goes on until then
        time.sleep(0.05)
"""


class Chaos:
    """Faults of a cluster of two workers and some controllers; the dice say whom they meet, and when."""

    def __init__(
        self, daemons: Daemons, nursery: Nursery, cable: Cable, dice: random.Random, *, limits: Enforcement
    ) -> None:
        self._daemons, self._nursery, self._cable, self._dice = daemons, nursery, cable, dice
        self._limits = limits

    @property
    def deeds(self) -> list[Callable[[], None]]:
        """Each of them leaves the cluster with all that it had."""
        return [
            self.kill_worker,
            self.lose_worker,
            self.kill_worker_and_keeper,
            self.kill_keeper,
            self.stop_keeper,
            self.kill_template,
            self.kill_controller,
            self.stop_controller,
            self.restart_server,
            self.fill_disk,
            self.cut_cable,
            self.kill_owner,
            self.set_clocks,
        ]

    def start_worker(self, name: str) -> None:
        """Start one of the two workers, for the first time or again."""
        service = self._daemons.server.credentials(Role.SERVICE)
        far = BusAddress(f"nats://127.0.0.1:{self._cable.port}", service.user, service.password)
        address = far if name == _WORKERS[1] else service
        self._daemons.start_worker(name, address=address, working_dir=None, enforce_limits=self._limits)

    def pause(self, seconds: float) -> None:
        """Up to so long: any moment is meant."""
        time.sleep(self._dice.uniform(0, seconds))

    # ---- workers and what they start ------------------------------------------------------------------------

    def kill_worker(self) -> None:
        name = self._worker()
        self._daemons.kill(name)
        self.pause(1)
        self.start_worker(name)

    def lose_worker(self) -> None:
        name = self._worker()
        self._daemons.kill(name, signal.SIGSTOP)
        time.sleep(self._daemons.timing.worker_timeout_s + 1)  # longer than it may be silent
        self._daemons.kill(name, signal.SIGCONT)

    def kill_worker_and_keeper(self) -> None:
        """By which the worker's template is all that is left; and sometimes the keeper is only stopped."""
        name = self._worker()
        keeper = self._process("fluster-keeper", of=name)
        number = self._dice.choice([signal.SIGKILL, signal.SIGSTOP])
        self._daemons.kill(name)
        _send(keeper, number)
        if self._dice.random() < 0.5:
            time.sleep(self._daemons.timing.worker_timeout_s + 1)  # the tasks are given away
        else:
            self.pause(1)
        self.start_worker(name)
        _send(keeper, signal.SIGCONT)

    def kill_keeper(self) -> None:
        _send(self._process("fluster-keeper", of=self._worker()), signal.SIGKILL)

    def stop_keeper(self) -> None:
        keeper = self._process("fluster-keeper", of=self._worker())
        _send(keeper, signal.SIGSTOP)
        self.pause(2)
        _send(keeper, signal.SIGCONT)

    def kill_template(self) -> None:
        """Its worker says that it has to be started again, and ends."""
        name = self._worker()
        template = self._process("fluster-templ", of=name)
        _send(template, signal.SIGKILL)
        worker = self._daemons.running.pop(name)
        try:
            worker.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._daemons.running[name] = worker
            raise AssertionError(f"{name} goes on without its template: {self._daemons.log(name)[-2000:]}") from None
        self.start_worker(name)

    def _worker(self) -> str:
        return self._dice.choice(_WORKERS)

    def _process(self, title: str, *, of: str) -> psutil.Process | None:
        """One of a worker's, with that name."""
        template = next(iter(self._children("fluster-templ", self._daemons.running[of].pid)), None)
        if template is None or title == "fluster-templ":
            return template
        found = self._children(title, template.pid)
        return self._dice.choice(found) if found else None

    def _children(self, title: str, parent: int) -> list[psutil.Process]:
        found = []
        for each in self._daemons.family.named(title):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                if each.ppid() == parent:
                    found.append(each)
        return sorted(found, key=lambda each: each.pid)

    # ---- controllers, server, wires -------------------------------------------------------------------------

    def kill_controller(self) -> None:
        name = self._controller()
        self._nursery.kill(name)
        self.pause(1)
        self._nursery.start(name)

    def stop_controller(self) -> None:
        name = self._controller()
        self._nursery.kill(name, signal.SIGSTOP)
        time.sleep(2 * self._daemons.timing.leader_lease_s)  # for longer than a leader may be silent
        self._nursery.kill(name, signal.SIGCONT)

    def _controller(self) -> str:
        return self._dice.choice(list(self._nursery.running))

    def restart_server(self) -> None:
        with self._server_away():
            self.pause(0.5)

    @contextmanager
    def _server_away(self) -> Iterator[None]:
        self._daemons.kill_server()
        try:
            yield
        finally:
            self._daemons.server.start()

    def cut_cable(self) -> None:
        self._cable.cut()
        self.pause(2)

    # ---- disks, clocks, programs ----------------------------------------------------------------------------

    def fill_disk(self) -> None:
        ballast = self._daemons.folder / _WORKERS[0] / "ballast"
        fill(ballast)
        self.pause(2)
        ballast.unlink()

    def set_clocks(self) -> None:
        """Some are days ahead, or behind, for the time that follows."""
        for name in CLOCKS:
            self._daemons.set_clock(name, self._dice.choice([0, DAYS_S, -DAYS_S]))

    def kill_owner(self) -> None:
        """A program that has workers of its own, or is about to; sometimes while the server is away."""
        client = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OWNER)],
            env=self._daemons.family.environment(FLUSTER_CLUSTER_ADDRESS=self._daemons.address),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with client, ExitStack() as stack:
            assert client.stdout is not None
            if self._dice.random() < 0.7:
                late = threading.Timer(_START_S, client.kill)
                late.start()
                stack.callback(late.cancel)
                assert client.stdout.readline(), f"a pool had no workers after {_START_S:g} s"
            else:
                self.pause(3)
            if self._dice.random() < 0.3:
                stack.enter_context(self._server_away())
            client.kill()
            client.wait()
            self.pause(0.5)


def _send(process: psutil.Process | None, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        if process is not None:
            process.send_signal(number)


class Waits:
    """Waits with time-outs, one after the other, and how much longer than that they took."""

    def __init__(self, cluster: Cluster, job_id: JobId, pool: ActorPool[Any]) -> None:
        self._enough = threading.Event()
        self._late: list[tuple[str, float]] = []
        self._error: BaseException | None = None
        self._waits: dict[str, Callable[[float], object]] = {
            "wait": lambda timeout: cluster.wait(job_id, timeout=timeout),
            "wait_first": lambda timeout: cluster.wait_first([job_id], timeout=timeout),
            "result": lambda timeout: cluster.result(job_id, timeout=timeout),
            "call": lambda timeout: pool.call(timeout=timeout).ping(),
            "broadcast": lambda timeout: pool.broadcast(timeout=timeout).ping().results(),
            "wait_for_size": lambda timeout: pool.wait_for_size(2, timeout=timeout),
        }
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in self._waits]

    def _run(self, name: str) -> None:
        try:
            while not self._enough.wait(0.05):
                timeout = 0.5
                began = time.monotonic()
                with contextlib.suppress(FlusterError):
                    self._waits[name](timeout)
                self._late.append((name, time.monotonic() - began - timeout))
        except BaseException as error:  # of a thread: raised where that is joined
            self._error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._enough.set()
            for thread in self._threads:
                thread.join(60)
        if self._error is not None:
            raise self._error

    def check(self, *, late_s: float) -> None:
        """Each of them was tried, and none took much longer than it was given."""
        assert not [thread for thread in self._threads if thread.is_alive()]
        assert {name for name, _ in self._late} == set(self._waits)
        assert max(self._late, key=lambda each: each[1])[1] < late_s, sorted(self._late, key=lambda each: each[1])[-5:]


def mounts_below(folder: Path) -> list[str]:
    """What is mounted in it."""
    return [
        each.mountpoint for each in psutil.disk_partitions(all=True) if Path(each.mountpoint).is_relative_to(folder)
    ]
