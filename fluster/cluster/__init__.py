"""Jobs and endpoints of a cluster. It knows nothing of actors, which are built on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.cluster.local import LocalCluster, current_cluster
from fluster.cluster.task.task_context import TaskContext, current_task
from fluster_bus.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from fluster.cluster.jobs.batched_logs import Batched
    from fluster.cluster.refs import Ref

__all__ = [
    "AsyncCluster",
    "Batched",
    "Cluster",
    "LocalCluster",
    "Ref",
    "TaskContext",
    "current_cluster",
    "current_task",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"jobs.batched_logs": ("Batched",), "refs": ("Ref",)})
