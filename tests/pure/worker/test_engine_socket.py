"""The part of the docker SDK that is not public and that `engine_socket` replaces.

A release of the SDK that changes it fails here, and not at a worker: see what it does now, and change both.
"""

from __future__ import annotations

import inspect

from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool

from fluster_services.worker.engine_socket import EngineSocket


def test_a_pool_makes_its_connections_by_the_method_that_is_replaced() -> None:
    assert list(inspect.signature(UnixHTTPConnectionPool._new_conn).parameters) == ["self"]  # noqa: SLF001 - the docker SDK's own, which ours replaces
    assert list(inspect.signature(UnixHTTPConnection.__init__).parameters)[1:] == ["base_url", "unix_socket", "timeout"]
    made = UnixHTTPConnectionPool("http+docker://localhost", "/no/such.sock", 5.0)._new_conn()  # noqa: SLF001 - the docker SDK's own, which ours replaces
    assert (made.base_url, made.unix_socket, made.timeout) == ("http+docker://localhost", "/no/such.sock", 5.0)


def test_the_pool_of_an_engine_makes_connections_that_close_their_socket() -> None:
    adapter = EngineSocket("http+unix:///no/such.sock", 5.0)
    pool = adapter.get_connection("http+docker://localhost/version")
    assert type(pool._new_conn()).connect is not UnixHTTPConnection.connect  # noqa: SLF001 - the docker SDK's own, which ours replaces
    assert isinstance(adapter, UnixHTTPAdapter)
    adapter.close()
