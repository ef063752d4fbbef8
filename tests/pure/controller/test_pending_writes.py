"""Which writes an answer waits for."""

from __future__ import annotations

import asyncio

import pytest

from fluster_bus.messages import JobId, Namespace
from fluster_services.controller.leading.record_writer import PendingWrites
from fluster_services.controller.state.job_index import JobKey

pytestmark = pytest.mark.anyio

ONE, OTHER = (JobKey(Namespace("default"), JobId(name)) for name in ("one", "other"))


def _in_s(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_only_writes_of_the_same_jobs_are_waited_for() -> None:
    writes = PendingWrites()
    with writes.of([ONE]):
        await writes.wait_settled([OTHER], until=_in_s(0))
        with pytest.raises(TimeoutError):
            await writes.wait_settled([OTHER, ONE], until=_in_s(0.01))
    await writes.wait_settled([OTHER, ONE], until=_in_s(0))


async def test_what_begins_later_is_not_waited_for() -> None:
    writes = PendingWrites()
    with writes.of([ONE]):
        with writes.of([ONE, OTHER]):
            waiting = asyncio.create_task(writes.wait_settled([ONE, OTHER], until=_in_s(60)))
            await asyncio.sleep(0)
        assert not waiting.done()
        later = writes.of([ONE])
        later.__enter__()
    await waiting
    later.__exit__(None, None, None)


async def test_a_write_that_fails_is_over() -> None:
    writes = PendingWrites()
    with pytest.raises(ValueError, match="no"), writes.of([ONE]):
        raise ValueError("no")
    await writes.wait_settled([ONE], until=_in_s(0))
