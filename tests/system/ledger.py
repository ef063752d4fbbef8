"""Jobs that write down when they begin and end, and two invariants of that.

Attempts of a fenced task never overlap: each attempt holds a lock on a file of its task as long as it lives,
and writes into a ledger when it finds the lock held. An acknowledged submit ends in exactly one final state: it is asked
for, and the event stream is read.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fluster.cluster import Cluster
from fluster_bus.core import buckets
from fluster_bus.messages import Event, JobId, JobInfo, JobRequest, JobStatus, ResourceConfig
from tests.system.histories import check_history
from tests.system.job_requests import call
from tests.waiting import wait_until

PATIENCE_S = 120  # after many faults on a busy machine
SMALL = ResourceConfig.with_cpu(0.5, memory="128MiB")


class Ledger:
    """A file to which each attempt appends a line when it begins and one when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "ledger"
        self.file.touch()

    def request(self, *, seconds: float, replicas: int = 1) -> JobRequest:
        folder = str(self.folder)

        def work() -> None:
            import fcntl
            import os
            import time

            job, task, attempt = (os.environ[f"FLUSTER_{name}"] for name in ("JOB_ID", "TASK_INDEX", "ATTEMPT"))

            def write(word: str) -> None:
                file = os.open(f"{folder}/ledger", os.O_WRONLY | os.O_APPEND)
                os.write(file, f"{word} {job} {task} {attempt}\n".encode())  # one write: lines do not mix
                os.close(file)

            # The kernel lets go of it when the process is gone, in whatever way.
            lock = os.open(f"{folder}/{job}.{task}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                write("overlap")
            write("begin")
            time.sleep(seconds)
            write("end")

        return call(work, name="work", resources=SMALL, replicas=replicas, retry_backoff_s=0.05)

    def lines(self) -> list[tuple[str, str, int]]:
        """(word, task, attempt) in the order in which they were written."""
        words = [line.split() for line in self.file.read_text().splitlines()]
        return [(word, f"{job}.{task}", int(attempt)) for word, job, task, attempt in words]

    def wait_lines(self, count: int) -> None:
        wait_until(lambda: len(self.lines()) >= count, PATIENCE_S, lambda: len(self.lines()))

    def check(self, infos: list[JobInfo], stories: dict[str, list[Event]]) -> None:
        """What ran is what the cluster says that ran."""
        begun: dict[str, list[int]] = defaultdict(list)
        ended: dict[str, list[int]] = defaultdict(list)
        for word, task, attempt in self.lines():
            assert word != "overlap", f"attempt {attempt} of {task} met another that lived: {stories[task]}"
            (begun if word == "begin" else ended)[task].append(attempt)
        for task, attempts in begun.items():
            assert attempts == sorted(set(attempts)), f"{task} began as {attempts}"
        for info in infos:
            for each in info.tasks:
                task = buckets.task_key(info.job_id, each.task)
                assert begun[task], f"{task} never ran"
                assert begun[task][-1] <= each.attempt
                if each.status is JobStatus.SUCCEEDED:
                    assert ended[task][-1:] == [each.attempt], task
        known = {buckets.task_key(info.job_id, each.task) for info in infos for each in info.tasks}
        assert begun.keys() <= known, "something ran that nobody launched"


class Load:
    """Jobs that are launched one after the other until it is enough; those whose submit was acknowledged."""

    def __init__(self, cluster: Cluster, ledger: Ledger, *, seconds: float, at_once: int = 60) -> None:
        self._cluster, self._ledger = cluster, ledger
        self._seconds, self._at_once = seconds, at_once
        self.acknowledged: list[JobId] = []
        self._enough = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._enough.is_set():
                replicas = 1 + len(self.acknowledged) % 2
                requests = [self._ledger.request(seconds=self._seconds, replicas=replicas) for _ in range(5)]
                self.acknowledged += self._cluster.launch_many(requests)
                begun = sum(word == "begin" for word, _, _ in self._ledger.lines())
                while len(self.acknowledged) * 1.5 - begun > self._at_once and not self._enough.wait(0.05):
                    begun = sum(word == "begin" for word, _, _ in self._ledger.lines())
        except BaseException as error:  # of a thread: raised where that is joined
            self._error = error

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            self._ledger.wait_lines(10)
            yield
        finally:
            self._enough.set()
            self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def check(self) -> list[JobInfo]:
        """Both invariants, for every submit that was acknowledged."""
        assert len(set(self.acknowledged)) == len(self.acknowledged)
        infos = self._cluster.wait(self.acknowledged, timeout=PATIENCE_S)
        assert Counter(info.status for info in infos) == {JobStatus.SUCCEEDED: len(self.acknowledged)}
        self._ledger.check(infos, check_history(self._cluster, infos))
        return infos
