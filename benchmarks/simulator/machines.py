"""The workers of a simulated cluster, by the rules of real ones: a ledger each, and offers for the classes it covers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.simulator.workload import MACHINE
from fluster_bus.messages import Capacity, WorkerId
from fluster_services import capacity
from fluster_services.capacity import CapacityClass
from fluster_services.worker.ledger import Ledger


class Machine:
    """A worker's machine."""

    def __init__(self, number: int) -> None:
        self.worker_id = WorkerId(f"worker-{number:05d}")
        self.start()

    def start(self) -> None:
        """Begin with nothing given away."""
        self.is_up = True
        self.ledger = Ledger(MACHINE)
        self.attempts: dict[str, Capacity] = {}  # {attempt key: what it was given}: kept beside the ledger, to check it

    def check(self) -> None:
        """Raise AssertionError when more is given away than there is."""
        assert sum(need.cpu for need in self.attempts.values()) <= MACHINE.cpu
        assert sum(need.memory for need in self.attempts.values()) <= MACHINE.memory


class QueueGroups:
    """Who listens on which class, as the server knows it: an offer goes to any one of them."""

    def __init__(self, needs: Sequence[Capacity], dice: random.Random) -> None:
        classes = {capacity.class_of(need) for need in needs}
        self._classes = [each for each in classes if each is not None]  # those that anybody asks for
        self._members: dict[CapacityClass, list[Machine]] = {each: [] for each in self._classes}
        self._places: dict[CapacityClass, dict[Machine, int]] = {each: {} for each in self._classes}
        self._dice = dice

    def cover(self, machine: Machine) -> None:
        """Listen on the classes that the machine's free capacity covers, and on no others."""
        free = machine.ledger.free
        for each in self._classes:
            is_covered = machine.is_up and each.cpu <= free.cpu and each.memory <= free.memory
            if is_covered != (machine in self._places[each]):
                (self._join if is_covered else self._leave)(each, machine)

    def _join(self, offered: CapacityClass, machine: Machine) -> None:
        self._places[offered][machine] = len(self._members[offered])
        self._members[offered].append(machine)

    def _leave(self, offered: CapacityClass, machine: Machine) -> None:
        members, place = self._members[offered], self._places[offered].pop(machine)
        last = members.pop()
        if last is not machine:
            members[place] = last
            self._places[offered][last] = place

    def any_of(self, need: Capacity) -> Machine | None:
        """Whoever gets an offer for `need`; None when nobody listens."""
        offered = capacity.class_of(need)
        members = self._members[offered] if offered is not None else []
        return members[self._dice.randrange(len(members))] if members else None
