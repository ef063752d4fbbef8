"""Zephyr pipelines on a Fluster cluster."""

from __future__ import annotations

import logging
import threading
from typing import Any

try:
    import zephyr.context as _zephyr  # noqa: F401 - older ones have none
except ImportError as error:
    raise ImportError(
        "fluster.integrations.zephyr needs Zephyr from 0.2.227 on: pip install 'fluster[zephyr]', with Python 3.12 or 3.13"
    ) from error

from fray.types import ResourceConfig
from zephyr.context import MAX_IRIS_WORKER_REPLICAS, ZephyrContext
from zephyr.dataset import Dataset
from zephyr.runners import InlineRunner

from fluster.cluster import Cluster, current_cluster
from fluster.cluster.arguments import check_count
from fluster.errors import FlusterError
from fluster.integrations.fray import FlusterClient
from fluster_bus.messages import EnvironmentConfig, parse_size

log = logging.getLogger(__name__)

_COORDINATOR_CPU = 0.1  # it mostly waits
_LONG_S = 10.0  # after this it is said what a pipeline waits for, if there is no worker yet
_RETRIES = 3  # of a whole pipeline whose coordinator was lost
_LOST_WORKERS = 5  # of one shard: it may be what kills them


class FlusterBackend:
    """Runs datasets on `cluster`, by default the one that this process belongs to (`current_cluster()`).

    Each pipeline has workers of its own: up to `max_parallelism`, and no more than it has shards, of `memory_per_worker` and one
    CPU each. It begins with the first that is there, and others join as there is room for them. A worker runs its shards in its
    own process; one that dies is begun anew, and what it was at is given out again. What stages hand to each other lies
    in `storage`, a folder or bucket that all workers reach, by default Zephyr's own choice. `environment` surrounds them, so that
    they find the program's code on other machines.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        max_parallelism: int = 100,
        memory_per_worker: int | str = "2GB",
        *,
        storage: str | None = None,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        check_count("max_parallelism", max_parallelism, 1, "the number of workers", most=MAX_IRIS_WORKER_REPLICAS)
        self._cluster = cluster if cluster is not None else current_cluster()
        self._environment = environment
        self._max_workers = max_parallelism
        self._memory = str(parse_size(memory_per_worker))  # in bytes: Zephyr reads other units than Fluster
        self._storage = storage

    def execute(self, dataset: Dataset[Any], *, name: str = "pipeline") -> list[Any]:
        """What the dataset's last stage gives, in order. Workers and coordinator are gone then, also when it fails.

        Raises ZephyrWorkerError when a stage does not come through, with its traceback; ValueError when there never will be
        room for a worker, TypeError for what cannot be pickled.
        """
        client = FlusterClient(self._cluster, environment=self._environment)
        context = ZephyrContext(
            client=client,
            max_workers=self._max_workers,
            resources=ResourceConfig(cpu=1, ram=self._memory),
            coordinator_resources=ResourceConfig(cpu=_COORDINATOR_CPU, ram=self._memory),
            chunk_storage_prefix=self._storage,
            name=name,
            max_execution_retries=_RETRIES,
            max_shard_infra_failures=_LOST_WORKERS,
            stage_runner_factory=InlineRunner,
        )
        patience = threading.Timer(_LONG_S, _tell_why_it_waits, [client])
        patience.daemon = True
        patience.start()
        try:
            results: list[Any] = context.execute(dataset).results
        finally:
            patience.cancel()
            client.shutdown()
        return results


def _tell_why_it_waits(client: FlusterClient) -> None:
    try:
        for reason in client.waiting():
            log.warning("the pipeline waits for room: %s", reason)
    except FlusterError as error:
        log.info("why the pipeline waits cannot be told: %s", error)
