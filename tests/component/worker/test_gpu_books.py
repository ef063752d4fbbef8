"""The books of workers against the locks of their machine: whatever happens, no GPU is had twice."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fluster_bus.messages import Capacity
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.gpus.holders import Holder, Traces, parse_note, why_not_gone
from fluster_services.worker.gpus.locks import GpuLock, GpuTakenError, find_lock_folder, lock_path

GPUS = tuple(f"GPU-{number}" for number in range(4))
HISTORIES, STEPS = 1_000, 30


def _need(count: int) -> Capacity:
    return Capacity(device="gpu", variant="h100", devices=count)


def _ledger() -> Ledger:
    return Ledger(Capacity(device="gpu", variant="h100", devices=len(GPUS)), GPUS)


@dataclass
class Attempt:
    """One that a keeper has begun: with its locks, of which its processes have copies, or have closed them."""

    key: str
    gpus: tuple[str, ...]
    holder: Holder
    keeper: list[GpuLock] = field(default_factory=list)  # empty once the keeper is dead
    copies: list[int] = field(default_factory=list)  # of descriptors, in processes of the task
    processes: int = 1


class Machine:
    """Workers of one machine, and what runs there; only the locks and the notes in them are shared between workers."""

    def __init__(self, folder: Path, workers: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.ledgers = [_ledger() for _ in range(workers)]
        self.begun: list[dict[str, Attempt]] = [
            {} for _ in range(workers)
        ]  # what a worker's state folder tells, by key
        self.escaped: list[Attempt] = []  # processes of which no worker knows
        self.number = 0
        self.had = 0

    # ---- what is checked --------------------------------------------------------------------------------

    def check(self) -> None:
        users = [each for begun in self.begun for each in begun.values() if each.processes] + self.escaped
        used = [gpu for each in users for gpu in each.gpus]
        assert len(used) == len(set(used)), f"had twice: {sorted(used)}"
        for ledger in self.ledgers:
            given = [gpu for key in ledger.attempts() for gpu in ledger.devices(key)]
            assert len(given) == len(set(given)), f"given twice by one worker: {given}"

    # ---- what happens -----------------------------------------------------------------------------------

    def step(self) -> None:
        self.random.choice(
            [self.claim, self.claim, self.end, self.kill_keeper, self.restart, self.look, self.end_escaped]
        )()
        self.check()

    def claim(self) -> None:
        """A worker claims a task; its keeper takes the locks, or gives the task back."""
        worker = self.random.randrange(len(self.ledgers))
        ledger = self.ledgers[worker]
        self.number += 1
        key = f"ns.job.{self.number}.1"
        if not ledger.reserve(key, _need(self.random.choice([1, 1, 2]))):
            return
        gpus = ledger.devices(key)
        proved = {gpu: self.proved(gpu) for gpu in gpus}
        if None in proved.values():
            ledger.withhold([gpu for gpu, note in proved.items() if note is None])
            ledger.release(key)
            return
        while self.random.random() < 0.4:  # between the look and the start others may be quicker, and die
            self.random.choice([self.claim, self.kill_keeper, self.end, self.look])()
        attempt = self.begin(key, gpus, {gpu: note or "" for gpu, note in proved.items()})
        if attempt is None:
            ledger.release(key)
            return
        self.had += len(gpus)
        self.begun[worker][key] = attempt

    def begin(self, key: str, gpus: tuple[str, ...], proved: dict[str, str]) -> Attempt | None:
        holder = Holder.here(key, since_boot_s=0.0, mark="")
        attempt = Attempt(key, gpus, holder)
        for gpu in gpus:
            lock = GpuLock(lock_path(self.folder, gpu))
            try:
                lock.take(gone=proved[gpu], patience_s=0.0)
            except GpuTakenError:
                lock.close()
                for each in attempt.keeper:
                    each.clear_note()
                    each.close()
                return None
            lock.write_note(holder.as_note())
            attempt.keeper.append(lock)
        if self.random.random() < 0.5:  # else its processes have closed the descriptors
            attempt.copies = [os.dup(each.fd) for each in attempt.keeper]
        return attempt

    def proved(self, gpu: str) -> str | None:
        """The note in a lock whose holder is gone; None when the lock is held, or he may not be."""
        lock = GpuLock(lock_path(self.folder, gpu))
        try:
            note = lock.note()
            if lock.is_held():
                return None
            holder = parse_note(note) if note else None
            if holder is not None and why_not_gone(holder, self.traces(holder)) is not None:
                return None
            return note
        finally:
            lock.close()

    def traces(self, holder: Holder) -> Traces:
        """What the kernel, or the driver, reports of an attempt's processes."""
        users = [each for begun in self.begun for each in begun.values()] + self.escaped
        living = [each for each in users if each.holder.nonce == holder.nonce and each.processes]
        pids = (1,) if living else ()
        return self.random.choice([Traces(pids=pids), Traces(gpu_pids=pids), Traces(group_pids=pids, pids=None)])

    def end(self) -> None:
        """All of a task ends, and its keeper says so."""
        found = self.some()
        if found is None:
            return
        worker, attempt = found
        self.end_processes(attempt)
        for lock in attempt.keeper:
            lock.clear_note()
            lock.close()
        self.forget(worker, attempt)

    def kill_keeper(self) -> None:
        """A keeper dies; what is left of its task may get out of sight."""
        found = self.some()
        if found is None:
            return
        worker, attempt = found
        for lock in attempt.keeper:
            lock.close()
        attempt.keeper = []
        if self.random.random() < 0.5:
            self.end_processes(attempt)
        else:
            self.escaped.append(attempt)
        self.forget(worker, attempt)

    def restart(self) -> None:
        """A worker dies, and another run of it adopts what it finds."""
        worker = self.random.randrange(len(self.ledgers))
        ledger = self.ledgers[worker] = _ledger()
        for key, attempt in self.begun[worker].items():
            ledger.hold(key, _need(len(attempt.gpus)), attempt.gpus)

    def look(self) -> None:
        """A worker looks which GPUs others have."""
        ledger = self.random.choice(self.ledgers)
        free = [gpu for gpu in ledger.device_ids if gpu not in ledger.devices_in_use]
        ledger.withhold([gpu for gpu in free if self.proved(gpu) is None])

    def end_escaped(self) -> None:
        if self.escaped:
            self.end_processes(self.escaped.pop(self.random.randrange(len(self.escaped))))

    # ---- helpers ----------------------------------------------------------------------------------------

    def some(self) -> tuple[int, Attempt] | None:
        known = [(worker, each) for worker, begun in enumerate(self.begun) for each in begun.values()]
        return self.random.choice(known) if known else None

    def forget(self, worker: int, attempt: Attempt) -> None:
        del self.begun[worker][attempt.key]
        self.ledgers[worker].release(attempt.key)

    @staticmethod
    def end_processes(attempt: Attempt) -> None:
        attempt.processes = 0
        for fd in attempt.copies:
            os.close(fd)
        attempt.copies = []

    def close(self) -> None:
        """End all; then every GPU can be had by a worker that looks."""
        while self.some() is not None:
            self.end()
        while self.escaped:
            self.end_escaped()
        assert [gpu for gpu in GPUS if self.proved(gpu) is None] == []


@pytest.mark.parametrize("batch", range(10))
def test_no_history_gives_a_gpu_to_two(batch: int, tmp_path: Path) -> None:
    had = 0
    for number in range(HISTORIES // 10):
        seed = batch * HISTORIES + number
        machine = Machine(find_lock_folder(str(tmp_path / str(seed))), workers=2, seed=seed)
        for _ in range(STEPS):
            machine.step()
        machine.close()
        had += machine.had
    assert had > HISTORIES // 10  # it is not for want of trying


def test_ten_thousand_claims_of_eight_gpus_give_none_twice(tmp_path: Path) -> None:
    """Two workers, each with its books, take and release GPUs by turns; the one has what the other has not."""
    folder, gpus = find_lock_folder(str(tmp_path / "locks")), tuple(f"GPU-{number}" for number in range(8))
    ledgers = [Ledger(Capacity(device="gpu", variant="h100", devices=8), gpus) for _ in range(2)]
    had: dict[str, tuple[int, str, GpuLock]] = {}  # {GPU: worker, attempt, its lock}
    chance = random.Random(1)
    claims = 0
    while claims < 10_000:
        worker = chance.randrange(2)
        key = f"ns.job.{claims}.{worker + 1}"
        if ledgers[worker].reserve(key, _need(1)):
            (gpu,) = ledgers[worker].devices(key)
            lock = GpuLock(lock_path(folder, gpu))
            try:
                lock.take(gone="", patience_s=0.0)
            except GpuTakenError:
                assert had[gpu][0] != worker
                lock.close()
                ledgers[worker].withhold([gpu for gpu, (other, *_) in had.items() if other != worker])
                ledgers[worker].release(key)
                continue
            assert gpu not in had
            claims += 1
            had[gpu] = worker, key, lock
        if len(had) == len(gpus) or chance.random() < 0.4:
            for gpu in chance.sample(sorted(had), k=min(len(had), chance.randrange(1, 4))):
                owner, attempt, lock = had.pop(gpu)
                lock.close()
                ledgers[owner].release(attempt)
            for each in (0, 1):
                ledgers[each].withhold([gpu for gpu, (other, *_) in had.items() if other != each])
    for _, _, lock in had.values():
        lock.close()
