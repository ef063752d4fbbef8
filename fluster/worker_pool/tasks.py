"""Single tasks: each has a future of its own. Those that take but a moment travel together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fluster.actors.results.futures import ActorFuture
from fluster.worker_pool.dispatch import Pace

_MAX_BUNDLE = 128 << 10  # bytes, unless one task has more
_FEWEST = 8  # tasks; fewer go to one worker each, so that they may wait for each other, as in other pools


class Task:
    """One call of a function, and its future."""

    __slots__ = ("deaths", "future", "losses", "pace", "payload")

    size = 1

    def __init__(self, payload: tuple[bytes, bytes], future: ActorFuture[Any], pace: Pace) -> None:
        self.payload = payload  # (the function, its arguments)
        self.future = future
        self.pace = pace
        self.losses = self.deaths = 0

    def __str__(self) -> str:
        return "the task"

    def parts(self) -> list[Task]:
        return [self]

    def fail(self, error: BaseException) -> int:
        """End it; how many tasks that were."""
        self.future.set_exception(error)
        return 1


class Bundle:
    """Tasks that one call to a worker carries. Each is answered as soon as it is done, in this order."""

    __slots__ = ("answered", "deaths", "losses", "pace", "tasks")

    def __init__(self, tasks: Iterable[Task], pace: Pace) -> None:
        self.tasks = deque(tasks)  # those that are not answered
        self.answered = 0  # since it was sent
        self.pace = pace
        self.losses = self.deaths = 0

    def __str__(self) -> str:
        return f"{self.size} tasks"

    @property
    def size(self) -> int:
        return len(self.tasks)

    def parts(self) -> list[Task]:
        for task in self.tasks:
            task.losses, task.deaths = self.losses, self.deaths
        return list(self.tasks)

    def fail(self, error: BaseException) -> int:
        """End those that are left; how many they are."""
        return sum(task.fail(error) for task in self.tasks)


class TaskQueue:
    """Tasks that wait: a source of them, one at a time or in bundles. `on_cancelled` is called for each that was cancelled."""

    def __init__(self, pace: Pace, on_cancelled: Callable[[], object]) -> None:
        self.pace = pace
        self._on_cancelled = on_cancelled
        self._waiting: deque[Task] = deque()

    def add(self, task: Task) -> None:
        self._waiting.append(task)

    @property
    def items(self) -> int:
        return len(self._waiting)

    def next_size(self, workers: int) -> int:
        share = len(self._waiting) // (2 * max(workers, 1))  # so that all workers have something to do
        return min(self.pace.chunk(), share) if share >= _FEWEST else min(1, len(self._waiting))

    def is_ending(self, workers: int) -> bool:  # noqa: ARG002
        return False  # more may be submitted at any time

    def take(self, size: int) -> Task | Bundle | None:
        tasks: list[Task] = []
        room = _MAX_BUNDLE
        while self._waiting and len(tasks) < size:
            room -= sum(map(len, self._waiting[0].payload))
            if room < 0 and tasks:
                break
            task = self._waiting.popleft()
            if task.future.set_running_or_notify_cancel():
                tasks.append(task)
            else:
                self._on_cancelled()
        if len(tasks) > 1:
            return Bundle(tasks, self.pace)
        return tasks[0] if tasks else None

    def fail(self, error: BaseException) -> int:
        """End all that wait. Returns how many there were."""
        return sum(task.fail(error) for task in self._take_all())

    def cancel(self) -> None:
        """Take all back that wait."""
        for task in self._waiting:
            task.future.cancel()
        self._take_all()

    def _take_all(self) -> list[Task]:
        waiting, self._waiting = self._waiting, deque()
        wanted: list[Task] = []
        for task in waiting:
            if task.future.set_running_or_notify_cancel():
                wanted.append(task)
            else:
                self._on_cancelled()
        return wanted
