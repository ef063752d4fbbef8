"""What was submitted reaches a reader, in order, until it is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import nats.errors
import pytest

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import BusError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Done, Entrypoint, JobRequest
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import submissions as submissions_module
from fluster_bus.storage.provisioning import ensure_system
from fluster_bus.storage.streams import append
from fluster_bus.storage.submissions import Submission, submissions
from tests.component.conftest import ConnectBus, kill_server
from tests.insides import nats_client_of
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture
async def service(own_server: EmbeddedServer, connect_bus: ConnectBus) -> Bus:
    bus = await connect_bus(own_server, Role.SERVICE)
    await ensure_system(bus)
    return bus


@pytest.fixture
async def client(own_server: EmbeddedServer, connect_bus: ConnectBus, service: Bus) -> Bus:
    return await connect_bus(own_server, Role.CLIENT, "default")


async def _submit(client: Bus, number: int) -> int:
    request = JobRequest(name=f"job{number}", entrypoint=Entrypoint(command=("true",)))
    return await append(client, subjects.jobs_submit("default"), request, message_id=f"default.{number}")


async def _next(reader: AsyncGenerator[Submission]) -> Submission:
    async with asyncio.timeout(60):
        return await anext(reader)


async def _name(submission: Submission) -> str:
    return JobRequest.from_json(await submission.message()).name


async def _left(service: Bus) -> int:
    return (await service.jetstream.stream_info(buckets.SUBMIT_STREAM)).state.messages


async def test_they_come_in_order(service: Bus, client: Bus) -> None:
    for number in range(5):
        await _submit(client, number)
    async with aclosing(submissions(service)) as reader:
        for number in range(10):
            if number >= 5:
                await _submit(client, number)
            submission = await _next(reader)
            assert (await _name(submission), submission.namespace) == (f"job{number}", "default")
            assert submission.sequence == number + 1
            await submission.done()
        assert await _left(service) == 0


async def test_what_is_refused_does_not_come_again(service: Bus, client: Bus) -> None:
    await _submit(client, 0)
    async with aclosing(submissions(service)) as reader:
        await (await _next(reader)).refuse()
        await wait_until_async(lambda: _is_empty(service))


async def _is_empty(service: Bus) -> bool:
    return await _left(service) == 0


async def test_the_same_job_twice_is_one_submission(service: Bus, client: Bus) -> None:
    assert await _submit(client, 0) == await _submit(client, 0)
    assert await _left(service) == 1


@pytest.mark.slow
async def test_what_was_not_acknowledged_comes_again_also_to_another(
    own_server: EmbeddedServer, connect_bus: ConnectBus, service: Bus, client: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    for number in range(3):
        await _submit(client, number)
    async with aclosing(submissions(service)) as reader:
        first = await _next(reader)
        assert await _name(first) == "job0"
        await (await _next(reader)).done()
    # The first reader is gone with two that it had and did not acknowledge.
    other = await connect_bus(own_server, Role.SERVICE)
    async with aclosing(submissions(other)) as reader:
        again = {await _name(each): each for each in [await _next(reader), await _next(reader)]}
        assert set(again) == {"job0", "job2"}
        assert again["job0"].sequence == 1
        for each in again.values():
            await each.done()
    assert await _left(service) == 0


async def test_the_newest_reader_takes_over_at_once(
    own_server: EmbeddedServer, connect_bus: ConnectBus, service: Bus, client: Bus
) -> None:
    """Also from one that still listens, as one does that was stopped."""
    async with aclosing(submissions(service)) as older:
        for number in range(3):
            await _submit(client, number)
        early = await _next(older)
        async with aclosing(submissions(await connect_bus(own_server, Role.SERVICE))) as newer:
            for number in range(3):
                submission = await _next(newer)
                assert (await _name(submission), submission.sequence) == (f"job{number}", number + 1)
                if number:
                    await submission.done()
            await _submit(client, 3)
            await (await _next(newer)).done()
            await early.done()  # what the older one did all the same counts
            await wait_until_async(lambda: _is_empty(service))


@pytest.mark.slow
async def test_a_restart_of_the_server_loses_none(
    own_server: EmbeddedServer, service: Bus, client: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions_module, "_ACK_WAIT_S", 1)
    seen: set[str] = set()

    async def reading() -> None:
        async with aclosing(submissions(service)) as reader:
            async for submission in reader:
                seen.add(await _name(submission))
                try:
                    await submission.done()
                except BusError:
                    await service.wait_connected()

    task = asyncio.create_task(reading())
    for round_ in range(3):
        await asyncio.gather(*(_submit(client, 10 * round_ + each) for each in range(10)))
        kill_server(own_server)
        await wait_until_async(lambda: not service.connected and not client.connected)
        own_server.start()
        for bus in (service, client):
            await bus.wait_connected(60)
        await wait_until_async(lambda: _answers(service))
    await _submit(client, 99)
    await wait_until_async(lambda: len(seen) == 31, describe=lambda: seen)
    await wait_until_async(lambda: _is_empty(service))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _answers(service: Bus) -> bool:
    try:
        await nats_client_of(service).jetstream(timeout=2).stream_info(buckets.SUBMIT_STREAM)
    except (nats.errors.Error, TimeoutError):
        return False
    return True


async def _has_consumer(service: Bus) -> bool:
    return bool(await service.jetstream.consumers_info(buckets.SUBMIT_STREAM))


async def test_what_is_no_submission_is_passed_over(
    service: Bus, client: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """A client can have a service answer to any inbox, that of the submissions among them."""

    async def handler(request: Done, _subject: str) -> Done:
        return request

    asked = subjects.jobs_verb("default", "status")
    await service.serve(asked, Done, handler)
    async with aclosing(submissions(service)) as reader:
        first = asyncio.create_task(_next(reader))
        await wait_until_async(lambda: _has_consumer(service))
        info = await service.jetstream.consumer_info(buckets.SUBMIT_STREAM, buckets.SUBMIT_CONSUMER)
        await client.publish(asked, b"{}", reply=str(info.config.deliver_subject))
        await wait_until_async(lambda: "not a submission" in caplog.text)
        await _submit(client, 0)
        assert await _name(await first) == "job0"
