"""Zephyr pipelines on a Fluster cluster, and whether their workers see the folder in which stages hand things to each other."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    from fluster.integrations.zephyr_coordinators import MAX_WORKERS, PipelineClient, ZephyrContext
except ImportError as error:
    raise ImportError(
        "fluster.integrations.zephyr needs Zephyr, 0.2.20.dev202606180959 or from 0.2.227 on: pip install "
        "'fluster[zephyr]'"
    ) from error

from fray.types import ResourceConfig
from fsspec.core import strip_protocol  # Zephyr's own
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import registry
from fsspec.utils import get_protocol
from zephyr.dataset import Dataset
from zephyr.runners import InlineRunner
from zephyr.stage_io import StageRunner

from fluster.cluster import Cluster, current_cluster, current_task
from fluster.cluster.jobs.arguments import check_count
from fluster_bus.messages import EnvironmentConfig as FlusterEnvironment
from fluster_bus.messages import parse_size

__all__ = ["FlusterBackend", "PipelineClient"]

_RETRIES = 3  # of a whole pipeline whose workers could not be begun, or whose connection was lost
_LOST_WORKERS = 5  # of one shard: it may be what kills them
_OF_THIS_MACHINE = ("file", "local")  # as fsspec has it


class FlusterBackend:
    """Runs datasets on `cluster`, by default the one that this process belongs to (`current_cluster()`).

    Each pipeline has workers of its own: up to `max_parallelism`, and no more than it has shards, of
    `memory_per_worker` and one CPU each. It begins with the first that is there, and others join as there is room for
    them. A worker runs its shards in its own process; one that dies is begun anew, and what it was at is given out
    again. What stages hand to each other lies in `storage`, a folder or bucket that this process and all workers reach,
    by default Zephyr's own choice; memory of this process (`memory://`) is a ValueError. `environment` surrounds them,
    so that they find the program's code on other machines.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        max_parallelism: int = 100,
        memory_per_worker: int | str = "2GB",
        *,
        storage: str | Path | None = None,
        environment: FlusterEnvironment | None = None,
    ) -> None:
        check_count("max_parallelism", max_parallelism, 1, "the number of workers", most=MAX_WORKERS)
        self._cluster = cluster if cluster is not None else current_cluster()
        self._environment = environment
        self._max_workers = max_parallelism
        self._memory = str(parse_size(memory_per_worker))  # in bytes: Zephyr reads other units than Fluster
        if storage is not None and not isinstance(storage, str | Path):
            raise TypeError(
                f"storage={storage!r}: give a folder's path or a bucket's address, such as 'gs://bucket/tmp'"
            )
        if storage is not None:
            check_shared(str(storage))
        self._storage = str(storage) if storage is not None else None

    def execute(self, dataset: Dataset[Any], *, name: str = "pipeline") -> list[Any]:
        """What the dataset's last stage gives, in order. Workers and coordinator are gone then, also when it fails.

        Raises ZephyrWorkerError when a stage does not come through, with its traceback, or a worker does not see the
        `storage`; ValueError when there never will be room for a worker, or Zephyr's choice of a storage is memory of
        this process, TypeError for what cannot be pickled, OSError for a storage that this process cannot write to.
        """
        client = PipelineClient(self._cluster, environment=self._environment)
        context = ZephyrContext(
            client=client,
            max_workers=self._max_workers,
            resources=ResourceConfig(cpu=1, ram=self._memory),
            chunk_storage_prefix=self._storage,
            name=name,
            max_execution_retries=_RETRIES,
            max_shard_infra_failures=_LOST_WORKERS,
        )
        assert context.chunk_storage_prefix is not None  # noqa: S101 - it has chosen one
        check_shared(context.chunk_storage_prefix)
        context.chunk_storage_prefix = whole(context.chunk_storage_prefix)
        with marked(context.chunk_storage_prefix) as context.stage_runner_factory:
            try:
                results: list[Any] = context.execute(dataset).results
            finally:
                client.shutdown()  # while the mark is there, which workers look for until they have ended
        return results


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
