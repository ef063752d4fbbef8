"""Jobs and endpoints of a cluster. It knows nothing of actors, which are built on it."""

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.cluster.current import current_cluster
from fluster.cluster.local import LocalCluster
from fluster.cluster.refs import Ref
from fluster.cluster.task_context import TaskContext, current_task

__all__ = ["AsyncCluster", "Cluster", "LocalCluster", "Ref", "TaskContext", "current_cluster", "current_task"]
