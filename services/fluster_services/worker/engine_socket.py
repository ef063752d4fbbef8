"""The SDK's way to an engine's socket, but for its socket where nobody listens: the SDK leaves that one open."""

from __future__ import annotations

import socket

from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool


class _Connection(UnixHTTPConnection):  # type: ignore[misc]  # the SDK has no types
    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self.unix_socket)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


class _Connections(UnixHTTPConnectionPool):  # type: ignore[misc]
    def _new_conn(self) -> _Connection:
        return _Connection(self.base_url, self.socket_path, self.timeout)


class EngineSocket(UnixHTTPAdapter):  # type: ignore[misc]
    """For `requests`, to be mounted in place of the SDK's own."""

    def get_connection(self, url: str, proxies: object = None) -> _Connections:  # noqa: ARG002 - the SDK's signature
        with self.pools.lock:
            pool: _Connections | None = self.pools.get(url)
            if pool is None:
                pool = self.pools[url] = _Connections(url, self.socket_path, self.timeout, maxsize=self.max_pool_size)
            return pool
