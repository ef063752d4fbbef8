"""Actors for the tests of the fray client, as programs that use fray have them."""

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fray.actor import current_actor
from fray.current_client import current_client

from fluster.integrations.fray import FlusterClient


class Counter:
    def __init__(self, start: int = 0) -> None:
        self._value = start
        self._mark = uuid.uuid4().hex

    def add(self, amount: int) -> int:
        self._value += amount
        return self._value

    def mark(self) -> str:
        """What no other instance has."""
        return self._mark

    def be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def lock(self) -> object:
        return threading.Lock()

    def numbers(self) -> Iterator[int]:
        yield 1


class Introspective:
    def __init__(self) -> None:
        found = current_actor()
        self._handle, self._index, self._group_name = found.handle, found.index, found.group_name
        self._client = current_client()

    def who(self) -> tuple[int, str]:
        return self._index, self._group_name

    def handle(self) -> Any:
        return self._handle

    def has_client(self) -> bool:
        return isinstance(self._client, FlusterClient) and current_client() is self._client

    def has_context(self) -> bool:
        try:
            current_actor()
        except RuntimeError:
            return False
        return True

    def add_at(self, counter: Any, amount: int) -> tuple[int, Any]:
        return counter.add(amount), counter

    def counters(self, count: int) -> Any:
        return current_client().create_actor_group(Counter, name="inner", count=count)

    def ready_of(self, group: Any) -> int:
        return len(group.wait_ready())


class Meeting:
    """Its calls wait for each other."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._open = threading.Event()

    def meet(self) -> int:
        return self._barrier.wait(60)

    def wait(self) -> str:
        return "opened" if self._open.wait(60) else "not opened"

    def open(self) -> None:
        self._open.set()


class Delegate:
    """Uses handles that it is given on a thread of its own, as coordinators do."""

    def add_to(self, counters: list[Any], amount: int) -> list[int]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(counter.add(amount) for counter in counters))
        thread.start()
        thread.join()
        return found


class Quitter:
    """Ends itself, the second time well."""

    def __init__(self) -> None:
        self._context = current_actor()
        self._attempt = int(os.environ["FLUSTER_ATTEMPT"])

    def quit(self) -> str:
        self._context.shutdown_event.set()
        return "bye"

    def fail(self, text: str) -> int:
        if self._attempt == 1:
            self._context.fail(RuntimeError(text))
        return self._attempt


class Broken:
    def __init__(self) -> None:
        raise LookupError("there is no such model")

    def get(self) -> None: ...


class Unserved:
    def on_start(self) -> None: ...

    def get(self) -> None: ...


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def say(lines: int) -> None:
    for number in range(lines):
        print(f"line {number}")


def fail(text: str) -> None:
    raise KeyError(text)


def launch_another(name: str) -> None:
    """The body of a job that has jobs of its own."""
    from fray.types import Entrypoint, JobRequest

    client = current_client()
    assert isinstance(client, FlusterClient)
    handle = client.submit(JobRequest(name=name, entrypoint=Entrypoint.from_callable(sleep, (0,))))
    assert handle.wait() == "succeeded"
    assert handle.job_id != name
