"""`python -m fluster.owner_helper`: tells a cluster that the program which started this lives, and when it has ended.

Its first line of standard input says which cluster, and as whom. On Linux it holds a pidfd of the program, which tells
its end and nothing else: a program that is stopped, or whose threads are all busy, is heard of as well as any other.
Elsewhere the end of standard input is the program's. A line of standard input says that nothing is owned by it any
longer.

It imports next to nothing, has no threads, and no connection between two messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import time
from dataclasses import dataclass

from fluster_bus.access.address import BusAddress
from fluster_bus.core import subjects
from fluster_bus.core.json_types import JsonObject
from fluster_bus.direct import wire
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.direct.wire import NumberedDelivery, Ping, ProtocolError, Refusal
from fluster_bus.running.backoff import Backoff

_STDIN = 0
_ANSWER_TIMEOUT_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # before a message without an answer is sent again
_IN_A_LEASE = 20  # messages
_LONGEST_INTERVAL_S = 30.0
_SETTLES_S = 2.0  # what the program submitted last may still be on its way when its end is reported
_END_TIMEOUT_S = 120.0  # of answers that jobs are left: the controller knows, and the lease ends what comes yet
_AWAY_TIMEOUT_S = 86_400.0  # without any answer


@dataclass(frozen=True)
class LeaseAnswer:
    """The controller's answer about an owner: how long its lease is, and how many of its jobs have not ended."""

    lease_s: float
    unfinished: int


class OwnerLeaseClient:
    """Renews the lease of one owner, and reports its end, to the controller of one cluster."""

    def __init__(self, address: BusAddress, namespace: str, owner: str) -> None:
        self._address = address
        self._namespace = namespace
        self._subject = subjects.jobs_verb(namespace, "own")
        self._owner = owner

    def report(self, *, ended: bool) -> LeaseAnswer | None:
        """The controller's answer; None when there was none."""
        for line in Dialler(self._address, f"owner-{self._owner}").attempts():
            if not isinstance(line, Line):
                continue
            with contextlib.suppress(OSError, ProtocolError, ValueError, KeyError, TypeError):
                return self._ask(line, ended=ended)
        return None

    def _ask(self, line: Line, *, ended: bool) -> LeaseAnswer | None:
        inbox = f"{self._address.inbox_prefix(self._namespace)}.{secrets.token_hex(8)}"
        data = json.dumps({"owner": self._owner, "ended": ended}).encode()
        line.add(wire.subscribe(1, inbox) + wire.publish(self._subject, data, inbox))
        line.flush()
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while (left_s := deadline - time.monotonic()) > 0 and line.wait(left_s):
            for said in line.read():
                if isinstance(said, NumberedDelivery):
                    answer = json.loads(said.delivery.data)  # an error has none, nor has a reply without a sender
                    return LeaseAnswer(float(answer["lease_s"]), int(answer.get("unfinished", 0)))
                if isinstance(said, Ping):
                    line.add(wire.PONG)
                    line.flush()
                if isinstance(said, Refusal):
                    return None
        return None


class Watch:
    """Whether the program lives, and whether it needs this helper."""

    def __init__(self, pidfd: int | None) -> None:
        self._pidfd = pidfd
        self._poll = select.poll()
        self._poll.register(_STDIN, select.POLLIN)
        if pidfd is not None:
            self._poll.register(pidfd, select.POLLIN)
        self.is_released = False

    def has_ended(self, within_s: float) -> bool:
        """Wait for so long; True when the program has ended by then, or has no use for this process."""
        deadline = time.monotonic() + within_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            ready = {descriptor for descriptor, _events in self._poll.poll(left_s * 1000)}
            if self._pidfd in ready:
                return True
            if _STDIN in ready:
                if os.read(_STDIN, 4096):
                    self.is_released = True
                    return True
                if self._pidfd is None:
                    return True
                self._poll.unregister(_STDIN)
            if not ready:
                return False


def serve(client: OwnerLeaseClient, watch: Watch) -> None:
    """Tell that the program lives until it does not, and then that."""
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    interval_s = backoff.pause_s
    while not watch.has_ended(interval_s):
        answer = client.report(ended=False)
        if answer is None:
            backoff.lengthen()
            interval_s = backoff.pause_s
            continue
        interval_s = min(answer.lease_s / _IN_A_LEASE, _LONGEST_INTERVAL_S)
        backoff.reset()
        backoff.longest_s = min(
            _LONGEST_PAUSE_S, interval_s
        )  # after an absence of bus or controller there is one lease's time
    if not watch.is_released:
        _tell_end(client)


class LastWords:
    """When the end of the program is reported again: until a controller has answered that nothing is left, for as long as
    none answers. Times are seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._began_at = self._changed_at = now
        self._is_heard = False
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_INTERVAL_S)

    def pause_s(self, answer: LeaseAnswer | None, *, now: float) -> float | None:
        """How long to wait after that answer, or none, to what was reported; None when it is not to be reported again."""
        is_heard = answer is not None
        if is_heard != self._is_heard:
            self._is_heard, self._changed_at = is_heard, now
            self._backoff.reset()
        if answer is not None and not answer.unfinished and now - self._began_at > _SETTLES_S:
            return None
        if now - self._changed_at >= (_END_TIMEOUT_S if is_heard else _AWAY_TIMEOUT_S):
            return None
        pause_s = self._backoff.pause_s
        self._backoff.longest_s = _LONGEST_PAUSE_S if is_heard else _LONGEST_INTERVAL_S
        self._backoff.lengthen()
        return pause_s


def _tell_end(client: OwnerLeaseClient) -> None:
    last_words = LastWords(time.monotonic())
    while True:
        answer = client.report(ended=True)
        pause_s = last_words.pause_s(answer, now=time.monotonic())
        if pause_s is None:
            return
        time.sleep(pause_s)


def read_line() -> JsonObject:
    """The first line of standard input. Raises ValueError when the program had ended before it was written."""
    text = b""
    while not text.endswith(b"\n"):
        part = os.read(_STDIN, 65_536)
        if not part:
            break
        text += part
    setup: JsonObject = json.loads(text)
    return setup


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # of a session or a slice that ends with the program
        signal.signal(number, signal.SIG_IGN)
    setup = read_line()
    os.chdir("/")
    address = BusAddress(**setup["address"])
    serve(OwnerLeaseClient(address, setup["namespace"], setup["owner"]), Watch(setup["pidfd"]))


if __name__ == "__main__":
    main()
