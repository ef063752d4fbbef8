"""The calls of one client run at each actor in the order in which they were made, also when they are sent again."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest

from fluster.actors import ActorPool
from fluster.errors import ActorError
from tests.component.actor_env import TIMEOUT_S, Calculator, Env, env  # noqa: F401 - a fixture
from tests.component.conftest import kill_server
from tests.waiting import wait_until

KILLS = 6


class Noter:
    """Notes what it was called with."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def note(self, number: int) -> None:
        self.noted.append(number)


class Stream:
    """Calls that are made one after the other, until it is ended."""

    def __init__(self, pool: ActorPool[Noter]) -> None:
        self._pool = pool
        self._over = threading.Event()
        self.made = 0
        self._thread = threading.Thread(target=self._make)
        self._thread.start()

    def _make(self) -> None:
        futures = []
        for number in itertools.count():
            if self._over.is_set():
                break
            futures.append(self._pool.submit().note(number))
            self.made = number
            if number % 20 == 0:
                self._over.wait(0.002)
        for future in futures:
            assert future.exception(TIMEOUT_S) is None or isinstance(future.exception(TIMEOUT_S), ActorError)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def _have_more(noters: list[Noter], before: list[int]) -> bool:
    return all(len(each.noted) > count for each, count in zip(noters, before, strict=True))


@pytest.mark.parametrize("members", [1, 2])
def test_calls_stay_in_order_when_the_server_is_killed(env: Env, members: int) -> None:  # noqa: F811
    noters = [Noter() for _ in range(members)]
    env.serve("noter", *noters)
    stream = Stream(env.pool("noter", size=members))
    try:
        for _ in range(KILLS):
            wait_until(functools.partial(_have_more, noters, [len(each.noted) for each in noters]), TIMEOUT_S)
            kill_server(env.server)
            env.server.start()
    finally:
        stream.end()
    for each in noters:
        assert each.noted == sorted(each.noted)
