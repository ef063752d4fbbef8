"""Whether a Zephyr pipeline's workers see the folder in which its stages hand things to each other."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import strip_protocol  # Zephyr's own
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import registry
from fsspec.utils import get_protocol
from zephyr.runners import InlineRunner
from zephyr.stage_io import StageRunner

from fluster.cluster import current_task

_OF_THIS_MACHINE = ("file", "local")  # as fsspec has it


def check_shared(storage: str) -> None:
    """Raise ValueError for a storage that lies in the memory of each process that names it, be it behind a cache."""
    for link in storage.split("::"):
        protocol = get_protocol(link)
        if protocol == MemoryFileSystem.protocol or issubclass(registry.get(protocol, object), MemoryFileSystem):
            raise ValueError(
                f"storage={storage!r} is memory of this process, which no worker sees: give a folder that all of "
                "them see, or "
                "a bucket, such as 'gs://bucket/tmp'"
            )


def whole(storage: str) -> str:
    """The storage as all processes find it: a folder's whole path, wherever they run and whose home they have."""
    return str(strip_protocol(storage)) if get_protocol(storage) in _OF_THIS_MACHINE else storage


@contextmanager
def marked(storage: str) -> Iterator[Callable[..., StageRunner]]:
    """What makes runners of shards in workers, while a file marks the whole `storage` as the folder that it is here.

    They raise FileNotFoundError where it is another: the pipeline would lose what it writes there, and try again for a
    minute. A bucket is the same everywhere, and is not marked. Raises OSError for what cannot be written to.
    """
    if get_protocol(storage) not in _OF_THIS_MACHINE:
        yield InlineRunner
        return
    marker = Path(storage) / f".fluster-{secrets.token_hex(8)}"
    try:
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as error:
        raise OSError(
            error.errno,
            f"storage={storage!r} cannot be used: {error.strerror}; give a folder that this program and its workers "
            "may "
            "write to, or a bucket",
        ) from error
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
                f"{current_task().worker_id} does not see storage={self._storage!r}, a folder of the program's "
                "machine: "
                "share it with the workers, as DockerBackend(folders=[...]) does with containers, or give "
                "FlusterBackend(storage=...) one that all of them see, or a bucket"
            )
        return super().execute(*shard)
