"""A bar that shows how far a map is."""

from __future__ import annotations


class ProgressBar:
    """Shown on stderr until all items are done. Without a total, the number of items that are."""

    def __init__(self, name: str, total: int | None) -> None:
        # Here, as each actor and worker has this module and few have a bar.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._task = self._progress.add_task(name, total=total)
        self._progress.start()

    def advance(self, items: int) -> None:
        """Note that so many more are done."""
        self._progress.advance(self._task, items)
        if self._progress.finished:
            self.stop()

    def stop(self) -> None:
        """Leave it as it is. Nothing happens the second time."""
        self._progress.stop()
