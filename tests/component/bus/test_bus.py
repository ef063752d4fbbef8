"""The connection, against a real server: what fails fails at once and says why; what is lost comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from pathlib import Path

import pytest
import uvloop

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    ClosedError,
    ConnectError,
    CredentialsError,
    DisconnectedError,
    InvalidMessageError,
    InvalidNameError,
    MessageTooLargeError,
    NoRespondersError,
    RequestTimeoutError,
    ServiceError,
)
from fluster_bus.core.names import unique_name
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.messages import Done, LogBatch
from fluster_bus.messages.parts.model import Message
from fluster_bus.server import EmbeddedServer
from tests.component.conftest import ConnectBus, freeze_server, kill_server, thaw_server
from tests.insides import nats_client_of, subscriptions_of
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

SOON_S = 20.0  # "at once", with room for a busy machine; far below the timeouts that it is distinguished from
LONG_S = 60.0
DRAIN_S = 2.0  # how long a connection is drained at most


class Number(Message):
    """A message for these tests."""

    value: int


async def _double(request: Number, _subject: str) -> Number:
    return Number(value=2 * request.value)


@pytest.fixture
def subject() -> str:
    return unique_name("test")


# ---- requests -------------------------------------------------------------------------------------------


async def test_a_service_answers(bus: Bus, subject: str) -> None:
    await bus.serve(subject, Number, _double)
    assert (await bus.ask(subject, Number(value=4), Number)).value == 8


async def test_many_requests_at_once_get_their_own_answers(bus: Bus, subject: str) -> None:
    await bus.serve(subject, Number, _double)
    answers = await asyncio.gather(*(bus.ask(subject, Number(value=each), Number) for each in range(200)))
    assert [answer.value for answer in answers] == [2 * each for each in range(200)]


async def test_nobody_listens(bus: Bus, subject: str) -> None:
    async with asyncio.timeout(SOON_S):
        with pytest.raises(NoRespondersError, match=subject):
            await bus.request(subject, timeout_s=LONG_S)


async def test_nobody_answers(bus: Bus, subject: str) -> None:
    await bus.subscribe(subject, lambda _delivery: None)
    with pytest.raises(RequestTimeoutError, match=subject) as raised:
        await bus.request(subject, timeout_s=0.05)
    assert isinstance(raised.value, TimeoutError)
    assert bus.awaited_replies == 0


async def test_an_answer_after_the_timeout_is_dropped(bus: Bus, subject: str) -> None:
    asked: asyncio.Queue[Delivery] = asyncio.Queue()
    await bus.subscribe(subject, asked.put_nowait)
    with pytest.raises(RequestTimeoutError):
        await bus.request(subject, timeout_s=0.01)  # which is asked all the same
    await bus.publish((await asked.get()).reply, b"late")
    request = asyncio.create_task(bus.request(subject, timeout_s=LONG_S))
    await bus.publish((await asked.get()).reply, b"in time")
    assert (await request).data == b"in time"


async def test_each_request_has_its_own_time(bus: Bus, subject: str) -> None:
    await bus.subscribe(subject, lambda _delivery: None)
    ended: list[float] = []

    async def ask(timeout_s: float) -> None:
        with pytest.raises(RequestTimeoutError, match=f"within {timeout_s:g} s"):
            await bus.request(subject, timeout_s=timeout_s)
        ended.append(timeout_s)

    longest = asyncio.create_task(bus.request(subject, timeout_s=LONG_S))
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(ask(1.0), ask(0.5), ask(0.25), ask(0.0))
        await ask(0.1)  # and one that comes when those are over
    assert ended == [0.0, 0.25, 0.5, 1.0, 0.1]
    assert not longest.done()
    longest.cancel()


async def test_what_is_heard_may_fail_and_the_connection_reads_on(
    bus: Bus, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []

    def take(delivery: Delivery) -> None:
        if delivery.data == b"unreadable":
            raise InvalidMessageError("it is no record")
        if delivery.data == b"bad":
            raise ValueError("it broke")
        heard.append(delivery.data)

    subscription = await bus.hear(subject, take)
    for data in (b"first", b"bad", b"unreadable", b"second"):
        await bus.publish(subject, data)
    await bus.flush()  # all that was sent before it has come, and was taken
    assert heard == [b"first", b"second"]
    assert "was not taken: ValueError: it broke" in caplog.text
    assert "was not taken: it is no record" in caplog.text
    await subscription.drain()
    await bus.publish(subject, b"third")
    await bus.flush()
    assert heard == [b"first", b"second"]
    assert subject not in subscriptions_of(bus)
    await bus.close()
    with pytest.raises(ClosedError):
        await bus.hear(subject, take)


async def test_what_is_sent_to_a_server_that_does_not_read_comes_in_order_when_it_does(
    own_server: EmbeddedServer, connect_bus: ConnectBus, subject: str
) -> None:
    bus, other = await connect_bus(own_server), await connect_bus(own_server)
    heard: list[Delivery] = []
    await other.hear(subject, heard.append)
    await other.flush()
    freeze_server(own_server)
    expected: list[bytes] = []
    for number in range(200):  # more than sockets and asyncio hold
        small, large = b"%d" % number, b"%d" % number * 30_000
        expected += [small, large]
        await bus.publish(subject, small)
        await bus.publish(subject, large, headers={"Some": "header"})
        await asyncio.sleep(0)
    thaw_server(own_server)
    await bus.publish(subject, b"last")
    await wait_until_async(lambda: bool(heard) and heard[-1].data == b"last")
    assert [each.data for each in heard] == [*expected, b"last"]
    assert [each.headers for each in heard[:2]] == [None, {"Some": "header"}]


async def test_a_cancelled_request_leaves_nothing(bus: Bus, subject: str) -> None:
    asked: asyncio.Queue[Delivery] = asyncio.Queue()
    await bus.subscribe(subject, asked.put_nowait)
    request = asyncio.create_task(bus.request(subject, timeout_s=LONG_S))
    await asked.get()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert bus.awaited_replies == 0


async def test_what_the_server_forbids_is_said_at_once(shared_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    job = await connect_bus(shared_server, Role.JOB, "default")
    forbidden = subjects.jobs_verb("other", "status")
    async with asyncio.timeout(SOON_S):
        with pytest.raises(CredentialsError, match=forbidden):
            await job.request(forbidden, timeout_s=LONG_S)
    assert job.connected


async def test_a_message_over_the_limit(bus: Bus, subject: str) -> None:
    with pytest.raises(MessageTooLargeError, match=f"{bus.max_payload + 1:,} bytes"):
        await bus.request(subject, b"x" * (bus.max_payload + 1))
    assert bus.awaited_replies == 0


@pytest.mark.parametrize(("beyond", "error"), [(0, None), (1, MessageTooLargeError)])
async def test_headers_count_as_a_part_of_a_message(
    bus: Bus, subject: str, beyond: int, error: type[Exception] | None
) -> None:
    """The server ends a connection for good on which more is sent."""
    heard: asyncio.Queue[Delivery] = asyncio.Queue()
    await bus.subscribe(subject, heard.put_nowait)
    headers = {"A": "ä" * 500}
    data = bytes(bus.max_payload - wire.headers_size(headers) + beyond)
    with pytest.raises(error, match="over the server's limit") if error is not None else contextlib.nullcontext():
        await bus.publish(subject, data, headers=headers)
    await bus.publish(subject, b"after")
    if error is None:
        assert len((await heard.get()).data) == len(data)
    assert (await heard.get()).data == b"after"


@pytest.mark.parametrize("letter", ["a", "\ufffd"])
async def test_no_message_is_sent_whose_first_line_the_server_does_not_take(bus: Bus, letter: str) -> None:
    """Subjects of three thousand bytes pass; for longer ones it would end the connection for good."""
    assert (await bus.request(await _echo(bus, _long(letter, 3_000)), b"x")).data == b"x"
    for size in (3_990, 4_096, 50_000):
        with pytest.raises(InvalidNameError, match="too many bytes"):
            await bus.request(_long(letter, size), b"x", headers={"A": "b"})
        with pytest.raises(InvalidNameError, match="too many bytes"):
            await bus.publish("x", reply=_long(letter, size + 100))
    await bus.flush()


def _long(letter: str, size: int) -> str:
    return letter * (size // len(letter.encode()))


async def _echo(bus: Bus, subject: str) -> str:
    await bus.subscribe(subject, lambda delivery: bus.publish(delivery.reply, delivery.data))
    return subject


async def test_a_service_that_comes_up_is_waited_for(bus: Bus, subject: str) -> None:
    asking = asyncio.create_task(bus.ask(subject, Number(value=4), Number, timeout_s=LONG_S))
    await bus.flush()
    await bus.serve(subject, Number, _double)
    assert (await asking).value == 8


# ---- services -------------------------------------------------------------------------------------------


async def test_handlers_run_together_up_to_the_bound(bus: Bus, subject: str) -> None:
    running, most, go_on = 0, 0, asyncio.Event()

    async def handler(request: Number, _subject: str) -> Number:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1
        return request

    await bus.serve(subject, Number, handler, concurrency=3)
    asking = [asyncio.create_task(bus.ask(subject, Number(value=each), Number)) for each in range(10)]
    await wait_until_async(lambda: running == 3)
    await bus.flush()
    assert running == 3
    go_on.set()
    assert [answer.value for answer in await asyncio.gather(*asking)] == list(range(10))
    assert most == 3


async def test_members_of_a_queue_share(bus: Bus, subject: str) -> None:
    calls: list[int] = []

    async def handler(request: Number, _subject: str) -> Number:
        calls.append(request.value)
        return request

    for _ in range(3):
        await bus.serve(subject, Number, handler, queue="workers")
    await asyncio.gather(*(bus.ask(subject, Number(value=each), Number) for each in range(20)))
    assert sorted(calls) == list(range(20))


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (ServiceError("JobNotFoundError", "no job 'x'"), "JobNotFoundError", "no job 'x'"),
        (InvalidNameError("invalid name 'a.b'"), "InvalidNameError", "invalid name 'a.b'"),
        (ServiceError("Odd", "two\nlines\r\nand a\x00zero"), "Odd", "two lines and a?zero"),
        (ServiceError("Unicode", "größer als 日本"), "Unicode", "größer als 日本"),
        (ServiceError("Surrogate", "a file name: \udcff"), "Surrogate", "a file name: ?"),
        (ServiceError("Empty", ""), "Empty", "Empty"),
        (ServiceError("Long", "x" * 100_000), "Long", None),
        (KeyError("secret"), "InternalError", "'secret'"),
    ],
)
async def test_what_a_handler_raises_is_answered(
    bus: Bus, subject: str, raised: Exception, code: str, text: str | None
) -> None:
    async def handler(_request: Done, _subject: str) -> Done:
        raise raised

    await bus.serve(subject, Done, handler)
    with pytest.raises(ServiceError) as answered:
        await bus.request(subject, timeout_s=SOON_S)
    assert answered.value.code == code
    assert "\n" not in str(answered.value)
    if text is not None:
        assert str(answered.value) == text


async def test_what_is_no_request_is_answered_with_what_is_wrong(bus: Bus, subject: str) -> None:
    await bus.serve(subject, Number, _double)
    with pytest.raises(ServiceError, match="no valid Number: value") as answered:
        await bus.request(subject, b'{"value": "no number"}')
    assert answered.value.code == "InvalidMessageError"


async def test_an_answer_over_the_limit_is_answered_too(bus: Bus, subject: str) -> None:
    async def handler(_request: Done, _subject: str) -> LogBatch:
        return LogBatch(offset=0, next_offset=1, lines=((0.0, "x" * bus.max_payload),))

    await bus.serve(subject, Done, handler)
    with pytest.raises(ServiceError, match="over the server's limit") as answered:
        await bus.request(subject, timeout_s=SOON_S)
    assert answered.value.code == "MessageTooLargeError"


async def test_a_reply_subject_that_is_no_inbox_is_refused(
    bus: Bus, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a client that may ask makes the service write where only the service may."""
    handled: list[int] = []
    heard: list[Delivery] = []

    async def handler(request: Number, _subject: str) -> Number:
        handled.append(request.value)
        return request

    target = f"{subject}-target"
    await bus.subscribe(target, heard.append)
    await bus.serve(subject, Number, handler)
    await bus.publish(subject, Number(value=1).to_json(), reply=target)
    await bus.ask(subject, Number(value=2), Number)
    await bus.publish(subject, Number(value=3).to_json())
    await wait_until_async(lambda: len(handled) == 2)
    await bus.flush()
    assert handled == [2, 3]
    assert heard == []
    assert "not an inbox" in caplog.text


async def test_leaving_by_drain_loses_nothing(
    bus: Bus, subject: str, shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    asker = await connect_bus(shared_server)
    for _ in range(5):
        subscription = await bus.serve(subject, Number, _double)
        await bus.flush()
        asking = [asyncio.create_task(asker.request(subject, Number(value=each).to_json())) for each in range(50)]
        await asyncio.sleep(0)
        await subscription.drain()
        for answer in await asyncio.gather(*asking, return_exceptions=True):
            assert not isinstance(answer, BaseException) or isinstance(answer, NoRespondersError)
        await subscription.drain()
        await subscription.unsubscribe()


async def test_subjects_that_are_left_together_lose_nothing_and_wait_for_the_server_once(
    bus: Bus, subject: str, shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    asker = await connect_bus(shared_server)
    served = [await bus.serve(f"{subject}.{number}", Number, _double) for number in range(20)]
    await bus.flush()
    asking = [asyncio.create_task(asker.request(f"{subject}.{number}", b'{"value": 1}')) for number in range(20)]
    await asyncio.sleep(0)
    before = nats_client_of(bus).stats["out_msgs"]
    await bus.drain_all(served)
    told = await asyncio.gather(*asking, return_exceptions=True)
    answers = [each for each in told if isinstance(each, Delivery)]
    assert all(isinstance(each, Delivery | NoRespondersError) for each in told)
    assert nats_client_of(bus).stats["out_msgs"] - before == 1 + len(answers)
    assert not [each for each in subscriptions_of(bus) if each.startswith(subject)]
    await bus.drain_all(served)
    assert nats_client_of(bus).stats["out_msgs"] - before == 1 + len(answers)


async def test_a_service_that_never_answers_is_named_with_the_time_it_was_given(bus: Bus, subject: str) -> None:
    await bus.subscribe(subject, lambda _request: None)
    with pytest.raises(RequestTimeoutError, match=r"within 0\.25 s"):
        await bus.ask(subject, Number(value=1), Number, timeout_s=0.25)


async def test_an_error_in_a_task_is_logged(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("it broke")

    bus.spawn(fail(), "the doomed one")
    await wait_until_async(lambda: "the doomed one failed" in caplog.text)
    assert "it broke" in caplog.text


# ---- losing the server ----------------------------------------------------------------------------------


async def test_a_request_that_is_out_fails_at_once_when_the_server_goes(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    asked: asyncio.Queue[Delivery] = asyncio.Queue()
    await bus.subscribe("silent", asked.put_nowait)
    asking = [asyncio.create_task(bus.request("silent", timeout_s=LONG_S)) for _ in range(3)]
    for _ in asking:
        await asked.get()
    kill_server(own_server)
    async with asyncio.timeout(SOON_S):
        for request in asking:
            with pytest.raises(DisconnectedError, match="being rebuilt"):
                await request


async def test_a_flush_fails_at_once_when_the_server_goes(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    bus = await connect_bus(own_server)
    freeze_server(own_server)
    flushing = asyncio.create_task(bus.flush())
    await asyncio.sleep(0)
    kill_server(own_server)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(DisconnectedError):
            await flushing


async def test_while_there_is_no_server_nothing_is_kept_back(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    heard: list[bytes] = []
    events: list[str] = []
    await bus.subscribe("numbers", lambda delivery: heard.append(delivery.data))
    await bus.serve("double", Number, _double)
    bus.on_disconnect(lambda: events.append("lost"))
    bus.on_reconnect(lambda: events.append("back"))

    def unwanted() -> None:
        events.append("unwanted")

    bus.on_reconnect(unwanted)
    bus.off(unwanted)
    await bus.flush()
    kill_server(own_server)
    await wait_until_async(lambda: not bus.connected)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(DisconnectedError):
            await bus.publish("numbers", b"never")
        with pytest.raises(DisconnectedError):
            await bus.request("double", Number(value=1).to_json(), timeout_s=LONG_S)
        with pytest.raises(DisconnectedError):
            await bus.flush()
        with pytest.raises(DisconnectedError):
            await bus.wait_connected(0.01)
    asking = asyncio.create_task(bus.ask("double", Number(value=2), Number, timeout_s=LONG_S))
    own_server.start()
    await bus.wait_connected(SOON_S)
    await bus.publish("numbers", b"again")
    await wait_until_async(lambda: heard == [b"again"], describe=lambda: heard)
    assert (await asking).value == 4
    assert events == ["lost", "back"]


async def test_it_comes_back_again_and_again(own_server: EmbeddedServer, connect_bus: ConnectBus) -> None:
    bus = await connect_bus(own_server)
    await bus.serve("double", Number, _double)
    for number in range(5):
        kill_server(own_server)
        own_server.start()
        assert (await bus.ask("double", Number(value=number), Number, timeout_s=LONG_S)).value == 2 * number


async def test_what_was_unsubscribed_while_the_server_was_away_does_not_come_back(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    subscription = await bus.subscribe("numbers", lambda _delivery: None)
    kill_server(own_server)
    await wait_until_async(lambda: not bus.connected)
    await subscription.unsubscribe()
    own_server.start()
    await bus.wait_connected(SOON_S)
    with pytest.raises(NoRespondersError):
        await bus.request("numbers")


async def test_a_connection_that_the_server_ended_for_good_says_so(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    asked: asyncio.Queue[Delivery] = asyncio.Queue()
    await bus.subscribe("silent", asked.put_nowait)
    asking = asyncio.create_task(bus.request("silent", timeout_s=LONG_S))
    await asked.get()
    await nats_client_of(bus)._process_err("'User Authentication Expired'")  # as the server words it  # noqa: SLF001 - nats-py's own, which ours must agree with
    async with asyncio.timeout(SOON_S):
        with pytest.raises(DisconnectedError):
            await asking
        with pytest.raises(ClosedError, match=r"(?i)expired"):
            await bus.wait_connected()
        with pytest.raises(ClosedError):
            await bus.publish("numbers")
        with pytest.raises(ClosedError):
            await bus.request("numbers", timeout_s=LONG_S)


async def test_who_waits_for_a_connection_hears_that_it_was_closed(
    own_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    bus = await connect_bus(own_server)
    kill_server(own_server)
    await wait_until_async(lambda: not bus.connected)
    waiting = asyncio.create_task(bus.wait_connected())
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        await bus.close()
        with pytest.raises(ClosedError):
            await waiting


# ---- coming and going -----------------------------------------------------------------------------------


async def test_refused_credentials_leave_nothing_open(shared_server: EmbeddedServer) -> None:
    address = shared_server.credentials(Role.OPERATOR)
    wrong = BusAddress(address.url, address.user, "wrong")
    before = _sockets()
    with pytest.raises(CredentialsError, match="refused the credentials") as raised:
        await Bus.connect(wrong, name="test")
    assert "wrong" not in str(raised.value)
    del raised
    gc.collect()  # an unclosed socket is an error here
    assert _sockets() <= before


async def test_no_server_there(own_server: EmbeddedServer) -> None:
    address = own_server.credentials(Role.OPERATOR)
    own_server.stop()
    with pytest.raises(ConnectError, match="is the cluster up") as raised:
        await Bus.connect(address, name="test", timeout_s=0.2)
    assert not isinstance(raised.value, CredentialsError)


async def test_a_file_whose_cluster_is_gone_is_named(own_server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "address.json"
    address = own_server.credentials(Role.OPERATOR)
    address.save(file)
    assert BusAddress.parse(str(file)) == address
    BusAddress(address.url, address.user, "earlier").save(file)
    with pytest.raises(
        CredentialsError, match=f"refused the credentials in the file {file}: they are of a cluster that"
    ):
        await Bus.connect(BusAddress.parse(str(file)), name="test")
    own_server.stop()
    with pytest.raises(
        ConnectError,
        match=f"no nats-server answers at .*, which the file {file} names: the cluster that wrote it is gone",
    ):
        await Bus.connect(
            BusAddress.from_environment({"FLUSTER_CLUSTER_ADDRESS": str(file)}), name="test", timeout_s=0.2
        )


async def test_something_else_listens_there() -> None:
    """It takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        before = _sockets()
        with pytest.raises(ConnectError):
            await Bus.connect(BusAddress(f"nats://127.0.0.1:{port}", "u", "p"), name="test", timeout_s=0.2)
        gc.collect()
        assert _sockets() <= before


async def test_a_connect_that_is_cancelled_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        before = _sockets()
        connecting = asyncio.create_task(Bus.connect(BusAddress(f"nats://127.0.0.1:{port}", "u", "p"), name="test"))
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        accepted.close()
        gc.collect()
        assert _sockets() <= before


def _sockets() -> set[str]:
    """This process's open sockets."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


async def test_closing(shared_server: EmbeddedServer, subject: str) -> None:
    bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="test")
    asked: asyncio.Queue[Delivery] = asyncio.Queue()
    cancelled = asyncio.Event()
    await bus.subscribe(subject, asked.put_nowait)
    asking = asyncio.create_task(bus.request(subject, timeout_s=LONG_S))
    await asked.get()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    bus.spawn(endless(), "endless")
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        await bus.close()
        await bus.close()
    assert cancelled.is_set()
    assert not bus.connected
    with pytest.raises(ClosedError):
        await asking
    with pytest.raises(ClosedError):
        await bus.publish(subject)
    with pytest.raises(ClosedError):
        await bus.flush()
    with pytest.raises(ClosedError):
        await bus.wait_connected()


async def test_closing_does_not_wait_for_handlers_that_do_not_end(
    shared_server: EmbeddedServer, bus: Bus, subject: str
) -> None:
    server_bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="test")
    started = asyncio.Event()

    async def handler(_request: Number, _subject: str) -> Number:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    await server_bus.serve(subject, Number, handler, concurrency=1)
    await server_bus.flush()
    for each in range(3):
        await bus.publish(subject, Number(value=each).to_json())
    await started.wait()
    began = asyncio.get_running_loop().time()
    await server_bus.close()  # nats-py swallows a cancellation here, so no timeout would show
    assert asyncio.get_running_loop().time() - began < SOON_S


async def test_what_was_sent_before_closing_arrives(
    shared_server: EmbeddedServer, connect_bus: ConnectBus, subject: str
) -> None:
    heard: list[Delivery] = []
    listener = await connect_bus(shared_server)
    await listener.subscribe(subject, heard.append)
    await listener.flush()
    sender = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="test")
    for _ in range(100):
        await sender.publish(subject)
    await sender.close()
    await wait_until_async(lambda: len(heard) == 100)


async def test_closing_while_there_is_no_server(own_server: EmbeddedServer) -> None:
    bus = await Bus.connect(own_server.credentials(Role.OPERATOR), name="test")
    kill_server(own_server)
    await wait_until_async(lambda: not bus.connected)
    await bus.subscribe("numbers", lambda _delivery: None)
    async with asyncio.timeout(SOON_S):
        await bus.close()


@pytest.mark.parametrize("unsent", [0, 3])
async def test_closing_does_not_wait_for_a_server_that_has_just_died(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture, unsent: int
) -> None:
    """Before this process has heard of it."""
    bus = await Bus.connect(own_server.credentials(Role.OPERATOR), name="test")
    await bus.subscribe("numbers", lambda _delivery: None)
    await bus.flush()
    kill_server(own_server)
    for _ in range(unsent):
        await bus.publish("numbers")
    assert bus.connected
    began = asyncio.get_running_loop().time()
    await bus.close()
    assert asyncio.get_running_loop().time() - began < DRAIN_S / 2
    del bus
    gc.collect()  # an exception that nothing took is logged when the future that holds it goes
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


async def test_closing_is_quiet_when_the_server_dies_after_it_was_given_up(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The last that is waited for is an answer of it."""
    caplog.set_level(logging.INFO)
    bus = await Bus.connect(own_server.credentials(Role.OPERATOR), name="test")
    freeze_server(own_server)
    closing = asyncio.create_task(bus.close())
    await wait_until_async(lambda: "draining connection timed out" in caplog.text)
    kill_server(own_server)
    async with asyncio.timeout(SOON_S):
        await closing
    gc.collect()  # an unclosed socket is an error here


async def test_errors_can_be_told_apart() -> None:
    for kind in (DisconnectedError, ClosedError, RequestTimeoutError, NoRespondersError, ServiceError):
        assert issubclass(kind, BusError)


async def test_the_password_is_in_no_log(
    own_server: EmbeddedServer, connect_bus: ConnectBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    bus = await connect_bus(own_server)
    kill_server(own_server)
    await wait_until_async(lambda: not bus.connected)
    own_server.start()
    await bus.wait_connected(SOON_S)
    password = own_server.credentials(Role.OPERATOR).password
    assert password is not None
    assert password not in caplog.text


def test_closing_is_quiet_when_the_server_dies_at_that_moment(
    own_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async def close_a_broken_one() -> None:
        bus = await Bus.connect(own_server.credentials(Role.OPERATOR), name="test")
        freeze_server(own_server)
        for _ in range(3):
            await bus.publish("fluster.nobody", bytes(100_000))  # what it has not read makes its end a reset
        await asyncio.sleep(0)
        kill_server(own_server)
        await bus.close()

    own_server.start()
    uvloop.run(close_a_broken_one())  # as programs have it: its transports raise what asyncio's keep to themselves
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


async def test_the_end_is_heard_where_the_connection_is_lost_with_something_unsent(
    shared_server: EmbeddedServer,
) -> None:
    bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="test")
    ended = asyncio.Event()
    bus.on_end(ended.set)
    client = nats_client_of(bus)
    await client.publish("test", b"not sent any more")
    client.stream.abort()
    await client.close()  # as at an error of the server's that ends the connection
    async with asyncio.timeout(SOON_S):
        await ended.wait()
    await bus.close()


async def test_a_subject_is_left_also_where_the_connection_was_rebuilt_as_its_last_message_was_handled(
    bus: Bus, subject: str, shared_server: EmbeddedServer, connect_bus: ConnectBus
) -> None:
    entered, may_go, back = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handle(_delivery: Delivery) -> None:
        entered.set()
        await may_go.wait()

    subscription = await bus.subscribe(subject, handle, queue="group")
    await bus.flush()
    asker = await connect_bus(shared_server)
    await asker.publish(subject)
    await entered.wait()
    leaving = asyncio.create_task(bus.drain_all([subscription]))
    await bus.flush()  # after that of `drain_all`, which waits for the handler then
    await asyncio.sleep(0)
    bus.on_reconnect(back.set)
    nats_client_of(bus).stream.abort()
    await back.wait()
    may_go.set()
    await leaving
    await bus.flush()
    with pytest.raises(NoRespondersError):
        await asker.request(subject, timeout_s=SOON_S)


async def test_an_answer_to_a_drain_that_came_too_late_is_no_error(
    shared_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await Bus.connect(shared_server.credentials(Role.OPERATOR), name="test")
    client = nats_client_of(bus)
    given_up = asyncio.create_task(client.flush())
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait({given_up})
    await bus.flush()
    await client.flush()
    await bus.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
