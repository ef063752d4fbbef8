"""Receives the end of a call that carries work to a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fluster.actors.protocol.flow_control import Read, Window
from fluster.actors.results.reader import ItemsTicket
from fluster.errors import ActorDiedError, ConnectionLostError
from fluster.worker_pool.runner import BUNDLE_WINDOW
from fluster.worker_pool.tasks import Bundle, Task
from fluster_bus.payloads import payloads

UnitT_contra = TypeVar("UnitT_contra", contravariant=True)


class Answered(Protocol[UnitT_contra]):
    """Who is to know what became of a unit."""

    def on_answered(self, worker: str, unit: UnitT_contra, ok: bool, payload: bytes) -> None: ...
    def on_error(self, worker: str, unit: UnitT_contra, error: BaseException) -> None: ...


class UnitTicket(Generic[UnitT_contra]):
    """Told how the call ends that carries a unit."""

    def __init__(self, owner: Answered[UnitT_contra], worker: str, unit: UnitT_contra) -> None:
        self._owner = owner
        self._worker = worker
        self._unit = unit
        self._over = False

    def done(self) -> bool:
        return self._over

    def cancelled(self) -> bool:
        return False  # it is the future of a task, or of an item, that can be

    def begin(self, _call: object) -> bool:
        return True

    def on_sent(self, _tell_read: Callable[[], object]) -> None:
        """The call is under way. `tell_read` tells the worker how far answers were read that come one by one."""

    def settle(self, ok: bool, payload: bytes) -> None:
        if payloads.is_lost(payload):
            self.set_exception(_died_with_answer(self._unit))
            return
        self._end()
        self._owner.on_answered(self._worker, self._unit, ok, payload)

    def set_exception(self, exception: BaseException) -> None:
        self._end()
        self._owner.on_error(self._worker, self._unit, exception)

    def _end(self) -> None:
        self._over = True


class BundleTicket(UnitTicket[Bundle], ItemsTicket):
    """The same of a bundle, whose tasks are answered one by one."""

    def __init__(
        self,
        owner: Answered[Bundle],
        worker: str,
        bundle: Bundle,
        on_result: Callable[[Task, bytes], object],
    ) -> None:
        super().__init__(owner, worker, bundle)
        self._on_result = on_result
        bundle.answered = 0
        self.progress = Read(Window(*BUNDLE_WINDOW))
        self._tell_read: Callable[[], object] | None = None

    def on_sent(self, tell_read: Callable[[], object]) -> None:
        self._tell_read = tell_read

    def _end(self) -> None:
        super()._end()
        self._tell_read = None  # which has the call, and that has this ticket

    def take(self, first: int, items: list[bytes]) -> bool:
        if self._over:  # the call has not been withdrawn yet; the bundle may be with another worker
            return False
        if first != self._unit.answered or len(items) > self._unit.size:
            self.set_exception(ConnectionLostError(f"{self._unit}: answers were lost on their way"))
            return False
        tasks = self._unit.tasks
        tells = False
        for item in items:
            if payloads.is_lost(item):
                self.set_exception(_died_with_answer(self._unit))
                return False
            self._unit.answered += 1
            tells = self.progress.read(payloads.size_of(item)) or tells
            self._on_result(tasks.popleft(), item)
        if tells and self._tell_read is not None:
            self._tell_read()
        return True


def _died_with_answer(unit: object) -> ActorDiedError:
    return ActorDiedError(f"{unit}: the worker ended before its answer was read, which lay in its memory")
