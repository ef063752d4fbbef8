"""The cluster that this process belongs to."""

from __future__ import annotations

import os
import sys
import threading

from fluster.cluster.blocking import Cluster
from fluster.cluster.local import LocalCluster, open_local_cluster
from fluster_bus.access.address import ADDRESS_VARIABLE

_lock = threading.Lock()
_current: Cluster | None = None


def current_cluster() -> Cluster:
    """The cluster that FLUSTER_CLUSTER_ADDRESS names, else the LocalCluster that this program has open (of several the
    newest), else one that is started on this machine; one per process.

    So the same program runs alone on a laptop and as a job of a cluster. Starting one is said on stderr. Raises what
    `Cluster` and `LocalCluster` raise.
    """
    global _current  # noqa: PLW0603 - one per process is what it promises
    with _lock:
        if _current is None or _current.closed:
            _current = Cluster() if os.environ.get(ADDRESS_VARIABLE) else open_local_cluster() or _start_local()
        return _current


def _start_local() -> LocalCluster:
    cluster = LocalCluster()
    sys.stderr.write(
        f"fluster: {ADDRESS_VARIABLE} is not set: started a cluster on this machine, which ends with this process\n"
    )
    return cluster


def _forget_in_child() -> None:
    global _current  # noqa: PLW0603
    _current = None  # its connection and threads stayed with the parent


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
