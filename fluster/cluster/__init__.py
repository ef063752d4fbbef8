"""Jobs and endpoints of a cluster. It knows nothing of actors, which are built on it."""

from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.cluster.current import current_cluster
from fluster.cluster.local import LocalCluster

__all__ = ["AsyncCluster", "Cluster", "LocalCluster", "current_cluster"]
