"""`make walk` counts what runs on all threads, and a walk of it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from benchmarks.walks import CallCounter, counted
from fluster_bus.core.names import check_name
from fluster_bus.direct.waiting import EAGER_VARIABLE
from tests.component.actor_env import Env


@pytest.fixture
def counter() -> Iterator[CallCounter]:
    counter = CallCounter()
    yield counter
    counter.close()


def _others() -> None:
    """Not counted, as tests are not part of the packages."""


def test_calls_are_counted_by_function_file_and_thread(counter: CallCounter) -> None:
    def walk() -> None:
        check_name("job", "one")
        check_name("job", "two")
        _others()
        thread = threading.Thread(target=check_name, args=("job", "three"))
        thread.start()
        thread.join()

    walked = counter.count(walk)
    assert (walked.calls, walked.functions, walked.files, walked.threads) == (3, 1, 1, 2)


def test_a_blocking_call_is_walked(counter: CallCounter, env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EAGER_VARIABLE, "0")
    walked = counted("call", counter, env.cluster())
    assert walked.calls >= walked.functions > walked.files > 10
    assert walked.threads >= 2  # the caller's and the actor's
