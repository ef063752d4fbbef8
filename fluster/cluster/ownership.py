"""What ends with this program: the helper process that tells clusters whether it lives."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from fluster.errors import JobRefusedError
from fluster_bus.address import BusAddress
from fluster_bus.names import JobId, Namespace, unique_name

if TYPE_CHECKING:
    from fluster.cluster.client import AsyncCluster
    from fluster_bus.messages import JobRequest

_log = logging.getLogger(__name__)

HELPER_MODULE = "fluster.owner_helper"
_RELEASED = b"released\n"


class _Helper(subprocess.Popen[bytes]):
    """It outlives the program for a moment, by design."""

    def __del__(self) -> None:
        pass


class Ownership:
    """This program as the owner of jobs in a namespace of one cluster, for as long as it owns any."""

    def __init__(self, address: BusAddress, namespace: Namespace) -> None:
        self._address = address
        self._namespace = namespace
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]
        self.owner = unique_name(f"{host}-{os.getpid()}")
        self._lock = threading.Lock()
        self._jobs: set[JobId] = set()
        self._helper: _Helper | None = None
        self._leaving: list[_Helper] = []

    def hold(self, job_id: JobId) -> None:
        """The program owns that job from now on."""
        with self._lock:
            self._jobs.add(job_id)
            self._reap()
            self._ensure_helper()

    def release(self, job_id: JobId) -> None:
        """It is stopped, or could not be launched."""
        with self._lock:
            self._jobs.discard(job_id)
            self._reap()
            if not self._jobs and self._helper is not None:
                assert self._helper.stdin is not None  # noqa: S101 - it is a pipe
                with contextlib.suppress(BrokenPipeError):
                    self._helper.stdin.write(_RELEASED)
                self._helper.stdin.close()
                self._leaving.append(self._helper)
                self._helper = None

    def _reap(self) -> None:
        self._leaving = [each for each in self._leaving if each.poll() is None]
        if self._helper is not None and self._helper.poll() is not None:
            _log.warning(
                "the helper that tells the cluster of this program ended with status %d", self._helper.returncode
            )
            self._close_pipe()
            self._helper = None

    def _ensure_helper(self) -> None:
        if self._helper is not None:
            return
        pidfd = _own_pidfd()
        try:
            self._helper = _Helper(
                [sys.executable, "-m", HELPER_MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,  # else whoever reads the program's output waits for this process too
                stderr=subprocess.DEVNULL,
                pass_fds=() if pidfd is None else (pidfd,),
                start_new_session=True,  # Ctrl-C at the terminal is for the program
                bufsize=0,
            )
        finally:
            if pidfd is not None:
                os.close(pidfd)
        setup = {
            "url": self._address.url,
            "user": self._address.user,
            "password": self._address.password,
            "namespace": self._namespace,
            "owner": self.owner,
            "pidfd": pidfd,
        }
        assert self._helper.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):
            self._helper.stdin.write(json.dumps(setup).encode() + b"\n")

    def _close_pipe(self) -> None:
        if self._helper is not None and self._helper.stdin is not None:
            self._helper.stdin.close()

    def drop(self) -> None:
        """In a forked child: the jobs are its parent's."""
        self._close_pipe()


def _own_pidfd() -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(os.getpid())
    except OSError:  # the kernel is older, or a sandbox refuses it
        return None


_lock = threading.Lock()
_local: set[str] = set()  # servers of clusters that end with this program anyway
_ownerships: dict[tuple[BusAddress, Namespace], Ownership] = {}


def note_local(server: str) -> None:
    """The cluster at that server ends with this program: nothing there needs another tie to it."""
    _local.add(server)


async def launch_owned(cluster: AsyncCluster, request: JobRequest) -> JobId:
    """As `cluster.launch`, for what is to end with whoever launches it: the task's attempt, else this program.

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
    for ownership in _ownerships.values():
        ownership.drop()
    _ownerships.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
