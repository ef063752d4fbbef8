"""The SDK's way to an engine's socket, which also closes a socket where the engine does not listen, and can bound each wait."""

from __future__ import annotations

import socket

from docker.transport.unixconn import UnixHTTPAdapter, UnixHTTPConnection, UnixHTTPConnectionPool
from requests import PreparedRequest, Response


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
    """For `requests`, to be mounted in place of the SDK's own.

    With `silence_s` an engine may say nothing for so many seconds, also in what the SDK waits for without end.
    """

    def __init__(self, path: str, timeout_s: float, *, silence_s: float | None = None) -> None:
        super().__init__(path, timeout_s)
        self._silence_s = silence_s

    def send(self, request: PreparedRequest, *arguments: object, **options: object) -> Response:
        """Raises requests.Timeout; reading the answer raises urllib3's TimeoutError."""
        if options.get("timeout") is None:
            options["timeout"] = self._silence_s
        answer: Response = super().send(request, *arguments, **options)
        return answer

    def get_connection(self, url: str, proxies: object = None) -> _Connections:  # noqa: ARG002 - the SDK's signature
        with self.pools.lock:
            pool: _Connections | None = self.pools.get(url)
            if pool is None:
                pool = self.pools[url] = _Connections(url, self.socket_path, self.timeout, maxsize=self.max_pool_size)
            return pool
