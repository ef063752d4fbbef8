"""Serves actors of this process to the cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import json
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from fluster.actors import frames
from fluster.actors.context import ActorContext
from fluster.actors.hosted import HostedActor
from fluster.actors.intake import Intake
from fluster.actors.members import CONNECTED_AT, LEAVING, TIMEOUTS
from fluster.actors.outbox import Outbox
from fluster.cluster.blocking import Cluster
from fluster.cluster.client import AsyncCluster
from fluster.cluster.portal import Portal
from fluster_bus import subjects
from fluster_bus.bus import Subscription
from fluster_bus.errors import BusError, ClosedError
from fluster_bus.messages import Endpoint, EndpointId
from fluster_bus.names import check_name
from fluster_bus.registry import LEASE_S, new_endpoint_id
from fluster_bus.retries import retried
from fluster_bus.services_api import Announcement, ServedEndpoint

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 30.0
_POOL_QUEUE = "members"
_REANNOUNCE_TIMEOUT_S = 60.0
_RESERVED = "fluster."


class ActorServer:
    """Serves actors: `register` them, then `serve()` until told to end, or `serve_background()` and go on.

    In a job's process its actors belong to the job: whoever stops it ends them. Elsewhere they are known as long as
    this process lives and for some seconds after it died without a `shutdown`.
    """

    def __init__(self, cluster: Cluster) -> None:
        if not isinstance(cluster, Cluster):
            raise TypeError(f"ActorServer takes a Cluster, not {cluster!r}")
        self._cluster = cluster
        self._host = _Host(cluster.asynchronous, self._loop_of_actors)
        self._actors: list[_Served] = []
        self._portal_of_actors: Portal | None = None
        self._lock = threading.Lock()
        self._serving = False
        self._ended = threading.Event()

    def register(self, name: str, instance: object, metadata: Mapping[str, str] | None = None) -> EndpointId:
        """Serve `instance` under `name`, as one more member of that pool; the id of its endpoint.

        It takes calls from `serve` on, or at once if this server serves already. `metadata` is shown to whoever
        looks at the pool's members.
        """
        check_name("actor name", name)
        if isinstance(instance, type):
            raise TypeError(
                f"register({name!r}, {instance.__name__}) got the class: pass an instance, {instance.__name__}(…), "
                "or have the cluster make one with deploy()"
            )
        for key in metadata or {}:
            if key.startswith(_RESERVED):
                raise ValueError(f"metadata {key!r} begins with {_RESERVED!r}, which is kept for Fluster")
        if self._ended.is_set():
            raise RuntimeError("this ActorServer was shut down: make another")
        served = self._host.make(name, instance, metadata or {}, self._cluster)
        with self._lock:
            self._actors.append(served)
            serving = self._serving
        if serving:
            self._cluster.portal.run(self._host.open, served)
        return served.endpoint.endpoint_id

    def serve_background(self) -> None:
        """Begin to serve and return; calls are handled on threads of their own."""
        with self._lock:
            if self._serving:
                return
            self._serving = True
            actors = list(self._actors)
        self._cluster.portal.run(self._host.start)
        for served in actors:
            self._cluster.portal.run(self._host.open, served)

    def serve(self) -> None:
        """Serve until `shutdown`, SIGTERM or Ctrl-C; then finish what has arrived, and return.

        Signals are heard in the main thread only.
        """
        if threading.current_thread() is not threading.main_thread():
            self.serve_background()
            self._ended.wait()
            return
        told = threading.Event()

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            told.set()

        previous = signal.signal(signal.SIGTERM, on_signal)
        try:
            self.serve_background()
            self._ended_or(told)
        finally:
            signal.signal(signal.SIGTERM, previous)
            self.shutdown()

    def _ended_or(self, told: threading.Event) -> None:
        # One event for both: a signal's handler sets it, and `shutdown` does through this.
        self._ended = _Either(self._ended, told)
        told.wait()

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT_S) -> None:
        """Take no more calls, finish those that have arrived, and leave the pools. Without effect the second time.

        After `timeout` seconds, calls that still wait are told that they were not run, and those that run are
        given up.
        """
