"""The workers of a simulated cluster, by the rules of real ones: a ledger each, and offers for the classes it covers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.simulator import workload
from fluster_bus.core import subjects
from fluster_bus.messages import Capacity, TaskRecord, WorkerId, WorkerInfo
from fluster_services import capacity
from fluster_services.capacity import CapacityClass
from fluster_services.controller.state.job_index import JobKey
from fluster_services.worker.attempts.ledger import Ledger


@dataclass(slots=True, eq=False)
class Attempt:
    """What a machine has claimed, until it has ended or the machine is lost."""

    machine: Machine
    job: JobKey
    record: TaskRecord  # as it was claimed
    need: Capacity
    name: str
    runs: bool = False


class Machine:
    """A worker's machine."""

    def __init__(self, number: int) -> None:
        self.worker_id = WorkerId(f"worker-{number:05d}")
        self.info = WorkerInfo(
            worker_id=self.worker_id,
            host="simulated",
            pid=1,
            total=workload.machine(number),
            version="",
            python="",
            started_at=0.0,
        )
        self.start()

    def start(self) -> None:
        """Begin with nothing given away."""
        self.is_up = True
        self.ledger = Ledger(self.info.total)
        self.attempts: dict[str, Attempt] = {}

    @property
    def busy_cpu(self) -> float:
        return sum(attempt.need.cpu for attempt in self.attempts.values())

    def check(self) -> None:
        """Raise AssertionError when more is given away than there is, or else than was taken."""
        assert self.attempts.keys() == self.ledger.attempts().keys() or not self.is_up
        taken = capacity.plus_all(Capacity(), [attempt.need for attempt in self.attempts.values()])
        left = capacity.minus(self.info.total, taken)
        assert min(left.cpu, left.memory, left.disk, left.devices) >= 0
        assert not self.is_up or left == self.ledger.free


class _Group:
    """Those that listen on one class."""

    def __init__(self, offered: CapacityClass) -> None:
        self.offered = offered
        self.members: list[Machine] = []
        self.places: dict[Machine, int] = {}

    def cover(self, machine: Machine, free: Capacity) -> None:
        each = self.offered
        is_covered = (
            machine.is_up
            and each.cpu <= free.cpu
            and each.memory <= free.memory
            and (
                not each.devices
                or (
                    each.devices <= free.devices
                    and each.device == free.device
                    and each.variant in (free.variant, capacity.ANY_VARIANT)
                )
            )
        )
        if is_covered == (machine in self.places):
            return
        if is_covered:
            self.places[machine] = len(self.members)
            self.members.append(machine)
            return
        place, last = self.places.pop(machine), self.members.pop()
        if last is not machine:
            self.members[place] = last
            self.places[last] = place


class Listeners:
    """Who listens on which subject, as the server knows it: each worker on its own, and on the classes that it covers."""

    def __init__(self, machines: Sequence[Machine], needs: Iterable[Capacity], dice: random.Random) -> None:
        classes = sorted(
            {each for need in needs if (each := capacity.class_of(need)) is not None}
        )  # those that some task needs
        self._groups = {each.subject: _Group(each) for each in classes}
        self._by_name = {subjects.worker_verb(machine.worker_id, "offer"): machine for machine in machines}
        self._dice = dice

    def cover(self, machine: Machine) -> None:
        """Listen on the classes that the machine's free capacity covers, and on no others."""
        free = machine.ledger.free
        for group in self._groups.values():
            group.cover(machine, free)

    def listened(self, machine: Machine) -> set[CapacityClass]:
        """The classes on which a machine listens."""
        return {group.offered for group in self._groups.values() if machine in group.places}

    def classes(self) -> set[CapacityClass]:
        """Those that some task needs."""
        return {group.offered for group in self._groups.values()}

    def any_of(self, subject: str) -> Machine | None:
        """The worker that gets what is sent there; None when no worker listens."""
        named = self._by_name.get(subject)
        if named is not None:
            return named if named.is_up else None
        members = self._groups[subject].members
        return members[int(self._dice.random() * len(members))] if members else None
