"""Whether a Zephyr pipeline's workers see the folder in which its stages hand things to each other."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zephyr.runners import InlineRunner
from zephyr.stage_io import StageRunner

from fluster.cluster import current_task

_OF_THIS_MACHINE = ("", "file", "local")  # as fsspec has it


@contextmanager
def marked(storage: str) -> Iterator[Callable[..., StageRunner]]:
    """What makes runners of shards in workers, while a file marks `storage` as the folder that it is here.

    They raise FileNotFoundError where it is another: the pipeline would lose what it writes there, and try again for a minute.
    A bucket is the same everywhere, and is not marked.
    """
    protocol, _, path = storage.rpartition("://")
    if protocol not in _OF_THIS_MACHINE:
        yield InlineRunner
        return
    marker = Path(path) / f".fluster-{secrets.token_hex(8)}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    try:
        yield functools.partial(_Runner, storage, marker)
    finally:
        marker.unlink(missing_ok=True)


class _Runner(InlineRunner):  # type: ignore[misc]  # Zephyr has no types
    def __init__(self, storage: str, marker: Path, *workers: int) -> None:
        super().__init__(*workers)  # their number, which 0.2.20 gives
        self._storage = storage
        self._marker = marker

    def execute(self, *shard: Any) -> Any:
        if not self._marker.exists():
            raise FileNotFoundError(
                f"{current_task().worker_id} does not see storage={self._storage!r}, a folder of the program's machine: "
                "share it with the workers, as DockerBackend(folders=[...]) does with containers, or give "
                "FlusterBackend(storage=...) one that all of them see, or a bucket"
            )
        return super().execute(*shard)
