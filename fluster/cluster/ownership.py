"""What ends with this program: the helper process that tells clusters whether it lives."""

from __future__ import annotations

import os
import re
import socket
import threading
from typing import TYPE_CHECKING

from fluster.cluster.helper_process import HelperProcess
from fluster.errors import JobRefusedError
from fluster_bus.access.address import BusAddress
from fluster_bus.core.names import JobId, Namespace, unique_name

if TYPE_CHECKING:
    from fluster.cluster.client import AsyncCluster
    from fluster_bus.messages import JobRequest


class Ownership:
    """This program as the owner of jobs in a namespace of one cluster, for as long as it owns any."""

    def __init__(self, address: BusAddress, namespace: Namespace) -> None:
        self._address = address
        self._namespace = namespace
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
        self.owner = unique_name(f"{host}-{os.getpid()}")
        self._lock = threading.Lock()
        self._jobs: set[JobId] = set()
        self._helper: HelperProcess | None = None

    def hold(self, job_id: JobId) -> None:
        """The program owns that job from now on."""
        with self._lock:
            self._jobs.add(job_id)
            if self._helper is None or self._helper.is_over:
                self._helper = self._new_helper()

    def release(self, job_id: JobId) -> None:
        """It is stopped, or could not be launched."""
        with self._lock:
            self._jobs.discard(job_id)
            if not self._jobs and self._helper is not None:
                self._helper.release()
                self._helper = None

    def _new_helper(self) -> HelperProcess:
        return HelperProcess({"address": self._address.values(), "namespace": self._namespace, "owner": self.owner})


_lock = threading.Lock()
_local: set[str] = set()  # servers of clusters that end with this program anyway
_ownerships: dict[tuple[BusAddress, Namespace], Ownership] = {}


def note_local(server: str) -> None:
    """The cluster at that server ends with this program: nothing there needs another tie to it."""
    _local.add(server)


async def launch_owned(cluster: AsyncCluster, request: JobRequest) -> JobId:
    """As `cluster.launch`, for what is to end with its launcher: the task's attempt, else this program.

    A job that is `detached` lives on.
    """
    is_child = request.parent is not None or cluster.parent_of(request)
    if request.detached or is_child or cluster.server in _local:
        return await cluster.launch(request)
    job_id = request.job_id or JobId(unique_name(request.name))
    ownership = _ownership(cluster.bus.address, cluster.namespace)
    ownership.hold(job_id)
    try:
        return await cluster.launch(request.model_copy(update={"job_id": job_id, "owner": ownership.owner}))
    except JobRefusedError:
        ownership.release(job_id)
        raise


def release(cluster: AsyncCluster, job_id: JobId) -> None:
    """A job of `launch_owned` is stopped."""
    with _lock:
        known = _ownerships.get((cluster.bus.address, cluster.namespace))
    if known is not None:
        known.release(job_id)


def _ownership(address: BusAddress, namespace: Namespace) -> Ownership:
    """This process's: its jobs end with the process, not with a connection."""
    with _lock:
        known = _ownerships.get((address, namespace))
        if known is None:
            known = _ownerships[address, namespace] = Ownership(address, namespace)
        return known


def _forget_in_child() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    _ownerships.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
