"""What a task finds when its callable is there."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluster_services.worker.task.task_process import _unpickled


class _Importing:
    """Does something when it is unpickled, as the module of a callable does when it is imported."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    usual = gc.get_threshold()
    gc.disable()  # as in the template
    yield
    gc.set_threshold(*usual)
    gc.enable()


def test_the_collector_is_on_as_in_any_program() -> None:
    usual = gc.get_threshold()
    _unpickled(pickle.dumps(int))
    assert (gc.isenabled(), gc.get_threshold()) == (True, usual)


def test_a_module_that_turns_the_collector_off_is_obeyed() -> None:
    _unpickled(pickle.dumps(_Importing(gc.disable)))
    assert not gc.isenabled()


def test_a_module_that_has_the_collector_come_more_rarely_is_obeyed() -> None:
    _unpickled(pickle.dumps(_Importing(gc.set_threshold, 50_000, 20, 20)))
    assert gc.get_threshold() == (50_000, 20, 20)
