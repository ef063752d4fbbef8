"""The cluster for programs that block."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Awaitable, Callable
from typing import Self

from fluster.cluster.blocking_methods import blocking, blocking_iterator
from fluster.cluster.client import AsyncCluster
from fluster.errors import ForkedError
from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import ClosedError
from fluster_bus.core.lazy_imports import import_later
from fluster_bus.core.names import Namespace

import_later("fluster.cluster.portal")

_open: weakref.WeakSet[Cluster] = weakref.WeakSet()


class Cluster:
    """A connection to a cluster, in one namespace, whose methods block. It may be used from any thread.

    Takes what `AsyncCluster.connect` takes. Its methods are those of AsyncCluster, with the same arguments.
    """

    def __init__(
        self,
        address: str | BusAddress | None = None,
        namespace: str | None = None,
        *,
        patience: float | None = None,
    ) -> None:
        self._connect(functools.partial(AsyncCluster.connect, patience=patience), address, namespace)

    def _connect(self, connect: Callable[..., Awaitable[AsyncCluster]], *args: object) -> None:
        from fluster.cluster.portal import Portal

        self._users: dict[object, Callable[[], object]] = {}  # {what works over this connection: how that is ended}
        self.portal: Portal = Portal()
        try:
            self.asynchronous: AsyncCluster = self.portal.run(connect, *args)
        except BaseException:
            self.portal.close()
            raise
        _open.add(self)

    put = blocking(AsyncCluster.put)
    get = blocking(AsyncCluster.get)
    launch = blocking(AsyncCluster.launch)
    launch_many = blocking(AsyncCluster.launch_many)
    poll = blocking(AsyncCluster.poll)
    wait = blocking(AsyncCluster.wait)
    wait_first = blocking(AsyncCluster.wait_first)
    watch = blocking_iterator(AsyncCluster.watch)
    result = blocking(AsyncCluster.result)
    terminate = blocking(AsyncCluster.terminate)
    explain = blocking(AsyncCluster.explain)
    stack = blocking(AsyncCluster.stack)
    list_jobs = blocking(AsyncCluster.list_jobs)
    list_workers = blocking(AsyncCluster.list_workers)
    list_nodes = blocking(AsyncCluster.list_nodes)
    worker_health = blocking(AsyncCluster.worker_health)
    drain_worker = blocking(AsyncCluster.drain_worker)
    run_on_worker = blocking(AsyncCluster.run_on_worker)
    logs = blocking_iterator(AsyncCluster.logs)
    log_chunks = blocking_iterator(AsyncCluster.log_chunks)
    register_endpoint = blocking(AsyncCluster.register_endpoint)
    unregister_endpoint = blocking(AsyncCluster.unregister_endpoint)
    lookup_endpoints = blocking(AsyncCluster.lookup_endpoints)
    list_endpoints = blocking(AsyncCluster.list_endpoints)

    @property
    def namespace(self) -> Namespace:
        return self.asynchronous.namespace

    @property
    def address(self) -> str:
        """The URL with credentials that FLUSTER_CLUSTER_ADDRESS takes."""
        return self.asynchronous.address

    @property
    def closed(self) -> bool:
        return self not in _open

    def __repr__(self) -> str:
        if "asynchronous" not in vars(self):
            return f"<{type(self).__name__} that is not connected>"
        closed = ", closed" if self.closed else ""
        return f"{type(self).__name__}({self.asynchronous.server!r}, namespace={self.namespace!r}{closed})"

    def _repr_html_(self) -> str:
        """What notebooks show: its workers and newest jobs, asked for now."""
        from fluster.cluster.cluster_view import live_view, still_view

        kind = type(self).__name__
        try:
            return self.portal.run(live_view, kind, self.asynchronous)
        except (ClosedError, ForkedError) as error:
            return still_view(kind, self.asynchronous, state=error)

    def close(self) -> None:
        """Leave the cluster; jobs go on, and actors that are served over this connection end."""
        if self in _open:
            _open.discard(self)
            try:
                for end in list(self._users.values()):
                    end()
            finally:
                self.portal.run(self.asynchronous.close)
                self.portal.close()

    def end_before_close(self, user: object, end: Callable[[], object]) -> None:
        """Have `end()` called before the connection is closed, unless `has_ended(user)` comes first."""
        self._users[user] = end

    def has_ended(self, user: object) -> None:
        """What works over this connection has ended, or is about to: it need not be ended when that is closed."""
        self._users.pop(user, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


# A forked child has its parent's objects and none of their threads: waiting for those would never end.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    for cluster in list(_open):
        cluster._users.clear()  # noqa: SLF001 - they end with the process; what would end them needs new threads
        cluster.close()
