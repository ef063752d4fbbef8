"""A bar that shows how far a map is."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol, cast

from fluster.terminal import is_notebook
from fluster_bus.messages.notebook import bar, view

if TYPE_CHECKING:
    from fluster.worker_pool.workers import PoolStatus


log = logging.getLogger(__name__)

_BETWEEN_S = 0.1  # two messages to a notebook


class Bar(Protocol):
    """Shown until all items are done. Without a total, the number of items that are."""

    def advance(self, items: int) -> None:
        """Note that so many more are done; from any thread."""

    def stop(self) -> None:
        """Leave it as it is. Nothing happens the second time."""

    def interrupt(self) -> None:
        """Make room for what comes next, as the wait for the items was interrupted; they may go on."""


def progress_bar(name: str, total: int | None) -> Bar:
    """A bar in the notebook's cell that runs, else on stderr."""
    return NotebookBar(name, total) if is_notebook() else TerminalBar(name, total)


class TerminalBar:
    """On stderr."""

    def __init__(self, name: str, total: int | None) -> None:
        # Here, as each actor and worker has this module and few have a bar.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()
        # Also when it is forgotten, and at the program's end: until then the cursor is hidden.
        self._finalizer = weakref.finalize(self, self._progress.stop)

    def advance(self, items: int) -> None:
        if self._finalizer.alive:
            self._progress.advance(self._task, items)
            if self._progress.finished:
                self.stop()

    def stop(self) -> None:
        self._finalizer()

    def interrupt(self) -> None:
        self.stop()


class NotebookBar:
    """In the output of the cell that made it, also when the next cell runs already."""

    def __init__(self, name: str, total: int | None) -> None:
        import IPython.display

        self._name = name
        self._total = total
        self._done = 0
        self._began = time.monotonic()
        self._next_at = self._began + _BETWEEN_S
        self._lock = threading.Lock()
        self._is_over = False
        display = cast("Any", IPython.display.display)  # it has types in part
        self._shown = display(self, display_id=True)

    def advance(self, items: int) -> None:
        with self._lock:
            self._done += items
            is_full = self._total is not None and self._done >= self._total
            if is_full or time.monotonic() >= self._next_at:
                self._show(is_over=is_full)

    def stop(self) -> None:
        with self._lock:
            self._show(is_over=True)

    def interrupt(self) -> None:
        """It has a place of its own, and goes on."""

    def _show(self, *, is_over: bool) -> None:
        if self._is_over:
            return
        self._is_over = is_over
        self._next_at = time.monotonic() + _BETWEEN_S
        # In no context, as the loop's is that of an earlier cell: kernels then take it as of the cell that runs now, and
        # find by the id where it is shown.
        try:
            contextvars.Context().run(self._shown.update, self)
        except Exception:  # the work goes on, whether it can be seen or not
            log.debug("the bar of %s could not be shown", self._name, exc_info=True)

    def __repr__(self) -> str:
        total = "?" if self._total is None else f"{self._total:,}"
        return f"{self._name} {self._done:,}/{total}{self._time()}"

    def _repr_html_(self) -> str:
        from fluster_bus.messages.notebook import bar

        # Without a total only the end is known; with one, a bar that was stopped stays where it was.
        end = self._done if self._is_over and self._total is None else self._total
        return bar(self._done, end, repr(self))

    def _time(self) -> str:
        elapsed_s = time.monotonic() - self._began
        if self._is_over:
            return f", {elapsed_s:,.1f} s"
        if self._total is None or not self._done:
            return ""
        return f", {elapsed_s / self._done * (self._total - self._done):,.0f} s left"


def pool_view(heading: str, status: PoolStatus | None, state: str = "") -> str:
    """HTML for notebooks of a pool with that status, if it is known."""
    if status is None:
        return view(heading, {"state": state})
    facts = {
        "state": state,
        "workers": f"{status.workers:,} of {status.wanted:,}",
        "waiting": f"{status.queued:,}",
        "at workers": f"{status.out:,}",
        "done": f"{status.done:,}",
        "failed": f"{status.failed:,}" if status.failed else None,
    }
    over = status.done + status.failed
    total = over + status.queued + status.out
    return view(heading, facts, bar(over, total, f"{over:,} of {total:,} tasks") if total else "")
