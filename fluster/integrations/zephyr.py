"""Zephyr pipelines on a Fluster cluster."""

from __future__ import annotations

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
from zephyr.dataset import Dataset

from fluster.cluster import Cluster, current_cluster
from fluster.cluster.jobs.arguments import check_count
from fluster.integrations.zephyr_storage import check_shared, marked, whole
from fluster_bus.messages import EnvironmentConfig as FlusterEnvironment
from fluster_bus.messages import parse_size

__all__ = ["FlusterBackend", "PipelineClient"]

_RETRIES = 3  # of a whole pipeline whose workers could not be begun, or whose connection was lost
_LOST_WORKERS = 5  # of one shard: it may be what kills them


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
