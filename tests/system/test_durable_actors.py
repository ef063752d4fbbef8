"""Durable actors and singletons whose processes are killed or stopped in the midst of calls: real processes and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import ActorContext, ActorDiedError, ActorPool, LocalCluster, actor, deploy
from fluster_bus.core.names import unique_name
from tests.system.processes import Family
from tests.waiting import wait_until

PATIENCE_S = 60.0


@actor(durable=True, max_restarts=5)
class Ledger:
    """Keeps the numbers that it was given, and writes down what it runs."""

    def __init__(self, journal: str) -> None:
        self.journal = Path(journal)
        self.numbers: list[int] = []

    def on_restore(self, state: list[int]) -> None:
        self.numbers = state

    def keep(self, ctx: ActorContext, number: int) -> int:
        with self.journal.open("a") as file:
            file.write(f"{number}\n")
        self.numbers.append(number)
        ctx.save(self.numbers)
        return len(self.numbers)

    def pid(self) -> int:
        return os.getpid()

    def all(self) -> list[int]:
        return self.numbers


def test_no_call_is_lost_nor_overtaken_when_the_process_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    journal, kills, calls_each = tmp_path / "journal", 3, 40
    pool: ActorPool[Any] = deploy(cluster, Ledger, str(journal), name=unique_name("ledger"))
    futures = []
    for first in range(0, kills * calls_each, calls_each):
        pid = pool.call().pid()
        futures += [pool.submit().keep(number) for number in range(first, first + calls_each)]
        wait_until(lambda under_way=f"{first + 3}\n": journal.exists() and under_way in journal.read_text())  # type: ignore[misc]
        os.kill(pid, signal.SIGKILL)
    unanswered: list[str] = []
    for position, future in enumerate(futures, start=1):
        try:
            assert future.result(PATIENCE_S) == position
        except ActorDiedError as error:
            unanswered.append(str(error))
    assert all("not run again" in each for each in unanswered), unanswered
    numbers = list(range(kills * calls_each))
    assert pool.call().all() == numbers
    ran = [int(line) for line in journal.read_text().splitlines()]
    assert ran == sorted(ran)
    assert sorted(set(ran)) == numbers
    assert len(ran) + len(unanswered) <= len(numbers) + kills
    pool.shutdown()


_SCRIPT = """
import sys
from pathlib import Path
from fluster import ActorContext, ActorServer, Cluster, actor
kind, name, who, folder = sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])

class Base:
    state = ()

    def on_restore(self, state):
        self.state = state

    def who(self) -> str:
        return who

    def all(self):
        return self.state

    def wait_for(self, ctx: ActorContext, file: str) -> str:
        (folder / f"{who}-entered").touch()
        while not (folder / file).exists():
            ctx.wait_cancelled(0.01)
        return who

    def save_after(self, ctx: ActorContext, file: str) -> str:
        self.wait_for(ctx, file)
        self.state = (*self.state, who)
        try:
            ctx.save(self.state)
        except Exception as error:
            (folder / f"{who}-refused").write_text(type(error).__name__)
            raise
        return who

with Cluster() as cluster:
    cluster.asynchronous.registry.told_seat_lease_s = 1.0
    server = ActorServer(cluster)
    server.register(name, actor(**{kind: True})(type("Served", (Base,), {}))())
    server.serve_background()
    print("serving", flush=True)
    server.serve()
"""


class Scripts:
    """Servers in processes of their own, outside of any job."""

    def __init__(self, cluster: LocalCluster, family: Family, folder: Path, kind: str) -> None:
        self.name = unique_name(kind)
        self.folder = folder
        self._kind = kind
        self._environment = family.environment(FLUSTER_CLUSTER_ADDRESS=cluster.address)
        self._script = folder / "serve.py"
        self._script.write_text(_SCRIPT)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, who: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, str(self._script), self._kind, self.name, who, str(self.folder)]
        process = subprocess.Popen(
            arguments, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what a test that failed left behind."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            with process:  # closes its pipes
                pass

    def start_serving(self, who: str) -> subprocess.Popen[str]:
        process = self.start(who)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "serving\n", process.communicate()
        return process

    def wait_for(self, file: str) -> str:
        wait_until((self.folder / file).exists, PATIENCE_S)
        return (self.folder / file).read_text()

    def stop(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # before that its threads may go on

    def end_superseded(self, process: subprocess.Popen[str]) -> None:
        _output, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "SupersededError" in errors

    def end(self, process: subprocess.Popen[str]) -> None:
        process.terminate()
        output, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, output) == (0, ""), errors
        assert not errors, errors


@pytest.fixture
def scripts_of(cluster: LocalCluster, family: Family, tmp_path: Path) -> Iterator[Callable[[str], Scripts]]:
    with contextlib.ExitStack() as stack:

        def make(kind: str) -> Scripts:
            scripts = Scripts(cluster, family, tmp_path, kind)
            stack.callback(scripts.close)
            return scripts

        yield make


def test_a_superseded_instance_neither_saves_nor_answers(
    cluster: LocalCluster, scripts_of: Callable[[str], Scripts], tmp_path: Path
) -> None:
    scripts = scripts_of("durable")
    pool: ActorPool[Any] = ActorPool(cluster, scripts.name)
    first = scripts.start_serving("first")
    pool.wait_for_size(1, PATIENCE_S)
    (tmp_path / "open").touch()
    assert pool.call().save_after("open") == "first"
    future = pool.submit().save_after("opened-later")
    wait_until(lambda: len(list(tmp_path.glob("first-entered"))) == 1, PATIENCE_S)
    scripts.stop(first)
    second = scripts.start_serving("second")
    scripts.wait_for("second-entered")
    first.send_signal(signal.SIGCONT)
    (tmp_path / "opened-later").touch()
    assert future.result(PATIENCE_S) == "second"
    scripts.end_superseded(first)
    assert pool.call().all() == ("first", "second")
    assert pool.call().who() == "second"
    scripts.end(second)


def test_one_that_is_stopped_while_another_takes_its_seat_does_not_save(
    cluster: LocalCluster, scripts_of: Callable[[str], Scripts], tmp_path: Path
) -> None:
    """As before, but it has no time to learn of its successor: it goes on right at what it saves."""
    scripts = scripts_of("durable")
    pool: ActorPool[Any] = ActorPool(cluster, scripts.name)
    first = scripts.start_serving("first")
    pool.wait_for_size(1, PATIENCE_S)
    future = pool.submit().save_after("open")
    scripts.wait_for("first-entered")
    scripts.stop(first)
    (tmp_path / "open").touch()
    second = scripts.start_serving("second")
    assert future.result(PATIENCE_S) == "second"
    first.send_signal(signal.SIGCONT)
    scripts.end_superseded(first)
    assert scripts.wait_for("first-refused") == "SupersededError"
    assert pool.call().all() == ("second",)
    scripts.end(second)


def test_a_singleton_lives_once(cluster: LocalCluster, scripts_of: Callable[[str], Scripts], tmp_path: Path) -> None:
    scripts = scripts_of("singleton")
    pool: ActorPool[Any] = ActorPool(cluster, scripts.name)
    first = scripts.start_serving("first")
    pool.wait_for_size(1, PATIENCE_S)
    refused = scripts.start("refused")
    _output, errors = refused.communicate(timeout=PATIENCE_S)
    assert "ActorNameTakenError" in errors
    assert f"process {first.pid} on" in errors
    future = pool.submit().wait_for("open")
    scripts.wait_for("first-entered")
    scripts.stop(first)
    second = scripts.start_serving("second")
    with pytest.raises(ActorDiedError, match="ended while the call was out"):
        future.result(PATIENCE_S)
    assert pool.call().who() == "second"
    (tmp_path / "open").touch()
    first.send_signal(signal.SIGCONT)
    scripts.end_superseded(first)
    assert pool.call().who() == "second"
    scripts.end(second)
