"""To which of its servers a connection is made, and when that is tried again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from urllib.parse import urlsplit

from fluster_bus.access.address import BusAddress
from fluster_bus.access.tls import HandshakeError, is_address
from fluster_bus.core.errors import AddressError, BusError, ConnectError, CredentialsError, UntrustedServerError
from fluster_bus.direct.line import Line, RefusedError
from fluster_bus.direct.wire import ProtocolError

_random = random.Random()  # not the one that programs seed: connections are made in threads of their own

_TIMEOUT_S = 2.0  # for each server
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class Dialler:
    """Of one connection, which is known to its servers by `name`. They tell of others that are in their cluster."""

    def __init__(self, address: BusAddress, name: str) -> None:
        self._address = address
        self._name = name
        self._servers = list(address.servers)
        self._tls_names: dict[
            str, str | None
        ] = {}  # {server: whose certificate it shows, if it was told of by its address alone}
        self._pause_s = _FIRST_PAUSE_S

    def attempts(self) -> Iterator[Line | BusError]:
        """Try one server after the other, in an order of chance: the line, with which it ends, or why there is none."""
        for server in _random.sample(self._servers, len(self._servers)):
            try:
                line = Line.dial(
                    server, self._address, self._name, timeout_s=_TIMEOUT_S, tls_name=self._tls_names.get(server)
                )
            except RefusedError as error:
                yield CredentialsError(f"{self._address} refused the credentials: {error}")
            except HandshakeError as error:
                yield UntrustedServerError(str(error))
            except AddressError as error:  # its certificates are damaged
                yield error
            except (OSError, ProtocolError) as error:
                yield ConnectError(f"no nats-server answers at {server}: {str(error) or type(error).__name__}")
            else:
                self._pause_s = _FIRST_PAUSE_S
                self._learn(line, server)
                yield line
                return

    def _learn(self, line: Line, server: str) -> None:
        scheme = self._servers[0].partition("://")[0]
        others = [f"{scheme}://{each}" for each in line.info.get("connect_urls", ())]
        name = self._tls_names.get(server) or urlsplit(server).hostname
        # Servers tell of each other by addresses, and certificates are for names: one of the group shows that of the group.
        self._tls_names = {each: name for each in others if is_address(urlsplit(each).hostname or "")}
        self._servers = list(dict.fromkeys([*self._address.servers, *others]))

    def next_pause_s(self) -> float:
        """How long to rest before the next attempts: about twice as long each time, until there is a line."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s * _random.uniform(0.75, 1.25)
