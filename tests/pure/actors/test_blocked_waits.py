"""Waits of the main thread, which see a Ctrl-C also when it came just before they began."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from fluster.actors import ActorFuture
from fluster.cluster.portal import Portal
from fluster_bus.running.blocked_waits import wait_seeing_signals
from tests.missed_signals import missed_ctrl_c


def test_of_what_runs_on_a_portal() -> None:
    portal = Portal()
    try:
        with pytest.raises(KeyboardInterrupt), missed_ctrl_c():
            portal.run(asyncio.Event().wait)
    finally:
        portal.close()


def test_of_a_call() -> None:
    with pytest.raises(KeyboardInterrupt), missed_ctrl_c():
        ActorFuture[int]("calculator.add").result()


def test_what_is_there_is_given_at_once_and_what_is_not_in_time() -> None:
    asked: list[float | None] = []

    def wait(timeout_s: float | None) -> bool:
        asked.append(timeout_s)
        return len(asked) == 3

    assert wait_seeing_signals(wait, None)
    assert asked == [0.5, 0.5, 0.5]
    asked.clear()
    assert wait_seeing_signals(wait, 60.0)
    assert asked == [0.5, 0.5, 0.5]
    assert not wait_seeing_signals(threading.Event().wait, 0.01)
    assert not wait_seeing_signals(threading.Event().wait, 0)


def test_other_threads_wait_in_one_go() -> None:
    asked: Future[float | None] = Future()

    def wait(timeout_s: float | None) -> bool:
        asked.set_result(timeout_s)
        return True

    threading.Thread(target=wait_seeing_signals, args=(wait, None)).start()
    assert asked.result(30.0) is None
