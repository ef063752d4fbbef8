"""The blocking connection: threads that read it in turn, and what happens to it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fluster.actors.client.lane_calls import LaneReaders
from fluster_bus.access.address import BusAddress
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import ClosedError, ConnectError, CredentialsError, DisconnectedError, MessageTooLargeError
from fluster_bus.core.roles import Role
from fluster_bus.direct import wire
from fluster_bus.direct.lane import Lane
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.direct.pulse import PingTiming
from fluster_bus.server import EmbeddedServer
from tests.component.conftest import freeze_server, kill_server
from tests.component.nats_servers import configured
from tests.waiting import wait_until

TIMEOUT_S = 60.0


class Asker:
    """Requests on a lane, each with a reply subject of its own."""

    def __init__(self, lane: Lane, inbox: str) -> None:
        self.lane, self._readers = lane, LaneReaders(lane)
        self._inbox = inbox
        self._answers: dict[str, Future[Delivery]] = {}
        self._lock = threading.Lock()
        lane.subscribe(f"{inbox}.*", lambda answer: self._answers[answer.subject].set_result(answer))

    def ask(self, subject: str, data: bytes, timeout_s: float = TIMEOUT_S) -> Delivery | None:
        with self._lock:
            reply = f"{self._inbox}.{len(self._answers)}"
            answer = self._answers[reply] = Future()
        self.lane.publish(subject, data, reply=reply)

        def when_done(callback: Callable[[], object]) -> None:
            answer.add_done_callback(lambda _: callback())

        self._readers.read_while(lambda: not answer.done(), when_done, timeout_s)
        return answer.result() if answer.done() else None


@contextmanager
def opened(address: BusAddress, **options: Any) -> Iterator[Lane]:
    lane = Lane(address, "test", **options)
    lane.start()
    try:
        lane.wait_connected(TIMEOUT_S)
        yield lane
    finally:
        lane.close()


@pytest.fixture
def address(shared_server: EmbeddedServer) -> BusAddress:
    return shared_server.credentials(Role.OPERATOR)


def echo(lane: Lane, subject: str) -> None:
    lane.subscribe(subject, lambda each: lane.publish(each.reply, each.data))


def receive_until(lane: Lane, event: threading.Event) -> None:
    while not event.is_set():
        lane.receive(TIMEOUT_S)


def seen(lane: Lane) -> None:
    """Return when the server has seen all that was sent."""
    event = threading.Event()
    lane.when_seen(event.set)
    assert event.wait(TIMEOUT_S)


def test_a_line_that_goes_as_a_part_of_a_cycle_closes_its_socket_without_a_complaint(address: BusAddress) -> None:
    """A warning of the socket's would be this test's error."""
    cycle: list[object] = [*Dialler(address, "test").attempts()]
    assert isinstance(cycle[0], Line)
    cycle.append(cycle)
    del cycle
    gc.collect()


def test_messages_go_both_ways_in_order(address: BusAddress) -> None:
    with opened(address) as lane, opened(address) as other:
        heard: list[bytes] = []
        done = threading.Event()

        def hear(delivery: Delivery) -> None:
            heard.append(delivery.data)
            if delivery.headers is not None:
                assert (delivery.headers, delivery.reply) == ({"Kind": "last"}, "there")
                done.set()

        other.subscribe("lane.order", hear)
        seen(other)
        for number in range(1_000):
            lane.publish("lane.order", b"%d" % number, flush=number % 10 == 0)
        lane.publish("lane.order", b"x" * 1_000_000)
        lane.publish("lane.order", b"last", reply="there", headers={"Kind": "last"})
        assert done.wait(TIMEOUT_S)
        assert heard == [b"%d" % number for number in range(1_000)] + [b"x" * 1_000_000, b"last"]


def test_nobody_who_listens_is_told_at_once(address: BusAddress) -> None:
    with opened(address) as lane:
        answer = Asker(lane, "_INBOX.lane-nobody").ask("lane.nobody", b"")
        assert answer is not None
        assert answer.status == "503"


def test_many_threads_read_in_turn(address: BusAddress) -> None:
    with opened(address) as lane, opened(address) as other:
        echo(other, "lane.echo")
        seen(other)
        asker = Asker(lane, "_INBOX.lane-many")
        wrong: list[object] = []

        def work(thread: int) -> None:
            for number in range(100):
                data = b"%d of %d" % (number, thread)
                answer = asker.ask("lane.echo", data)
                if answer is None or answer.data != data:
                    wrong.append(answer)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert wrong == []


def test_a_reader_gives_up_when_its_time_is_over(address: BusAddress) -> None:
    with opened(address) as lane:
        lane.subscribe("lane.silent", lambda _each: None)
        asker = Asker(lane, "_INBOX.lane-late")
        assert asker.ask("lane.silent", b"", timeout_s=0.02) is None
        late = threading.Thread(target=asker.ask, args=("lane.silent", b"", 0.2))
        late.start()
        assert asker.ask("lane.silent", b"", timeout_s=0.1) is None  # it waits for its turn, or the other does
        late.join(TIMEOUT_S)
        assert not late.is_alive()


def test_the_keeper_reads_while_nobody_does_and_gives_the_turn_to_who_wants_it(address: BusAddress) -> None:
    with opened(address) as lane:
        assert wait_until(lambda: lane.turns.holder is not None)
        came = threading.Event()
        assert not lane.turns.ask(came.set)
        lane.wake()
        assert came.wait(TIMEOUT_S)
        heard = threading.Event()
        lane.subscribe("lane.turn", lambda _each: heard.set())
        lane.publish("lane.turn", b"")
        receive_until(lane, heard)
        lane.leave(came.set)
        heard.clear()
        lane.publish("lane.turn", b"")
        assert heard.wait(TIMEOUT_S)


def test_waking_the_keeper_has_it_call_back(address: BusAddress) -> None:
    called = threading.Semaphore(0)
    with opened(address, on_wake=called.release) as lane:
        for _ in range(100):
            lane.wake()
            assert called.acquire(timeout=TIMEOUT_S)


def test_what_is_on_its_way_is_handed_on_after_leaving(address: BusAddress) -> None:
    with opened(address) as lane, opened(address) as other:
        heard: list[bytes] = []
        number = lane.subscribe("lane.leaving", lambda each: heard.append(each.data))
        seen(lane)
        for count in range(100):
            other.publish("lane.leaving", b"%d" % count)
        seen(other)
        gone = threading.Event()
        lane.unsubscribe([number], gone.set)
        assert gone.wait(TIMEOUT_S)
        assert len(heard) == 100
        other.publish("lane.leaving", b"more")
        seen(other)
        seen(lane)
        assert len(heard) == 100


def test_wrong_credentials_and_no_server_are_told_apart(own_server: EmbeddedServer) -> None:
    address = own_server.credentials(Role.OPERATOR)
    wrong = Lane(replace(address, password="wrong"), "test")
    wrong.start()
    with pytest.raises(CredentialsError, match="refused the credentials"):
        wrong.wait_connected(TIMEOUT_S)
    wrong.close()
    with pytest.raises(ClosedError):
        wrong.wait_connected(TIMEOUT_S)
    own_server.stop()
    nobody = Lane(address, "test")
    nobody.start()
    wait_until(lambda: nobody.error, TIMEOUT_S)
    with pytest.raises(ConnectError, match="no nats-server answers"):
        nobody.wait_connected(0)
    nobody.close()


def test_what_is_too_large_is_refused_here(address: BusAddress) -> None:
    with opened(address) as lane, pytest.raises(MessageTooLargeError, match="9,000,000 bytes"):
        lane.publish("lane.large", bytes(9_000_000))


@pytest.mark.parametrize("end", [EmbeddedServer.stop, kill_server])
def test_a_lost_connection_comes_back_with_its_subscriptions(
    own_server: EmbeddedServer, end: Callable[[EmbeddedServer], None]
) -> None:
    happened: list[str] = []
    lost, back = threading.Semaphore(0), threading.Semaphore(0)
    heard: list[bytes] = []

    def on_connect() -> None:
        happened.append("connected")
        back.release()

    def on_disconnect() -> None:
        happened.append("lost")
        lost.release()

    address = own_server.credentials(Role.OPERATOR)
    with opened(address, on_connect=on_connect, on_disconnect=on_disconnect) as lane:
        lane.subscribe("lane.back", lambda each: heard.append(each.data))
        for _ in range(3):
            assert back.acquire(timeout=TIMEOUT_S)
            lane.publish("lane.back", b"there")
            seen(lane)
            end(own_server)
            assert lost.acquire(timeout=TIMEOUT_S)
            assert not lane.connected
            with pytest.raises(DisconnectedError, match="is being rebuilt"):
                lane.publish("lane.back", b"lost")
            seen(lane)  # nothing is waited for while there is no connection
            own_server.start()
        assert back.acquire(timeout=TIMEOUT_S)
    assert heard == [b"there"] * 3
    assert happened == ["connected", "lost"] * 3 + ["connected"]
    with pytest.raises(ClosedError):
        lane.publish("lane.back", b"closed")


def test_a_connection_that_is_lost_at_once_is_told_as_lost(own_server: EmbeddedServer) -> None:
    lost, back = threading.Event(), threading.Event()
    stopped: list[bool] = []

    def on_connect() -> None:
        if lost.is_set():
            back.set()
        elif not stopped:
            stopped.append(True)
            own_server.stop()
            with contextlib.suppress(DisconnectedError):
                while True:
                    lane.publish("lane.at-once", bytes(1_000))
            own_server.start()

    lane = Lane(own_server.credentials(Role.OPERATOR), "test", on_connect=on_connect, on_disconnect=lost.set)
    lane.start()
    try:
        assert lost.wait(TIMEOUT_S)
        assert back.wait(TIMEOUT_S)
    finally:
        lane.close()


def test_a_reader_outlasts_a_lost_connection(own_server: EmbeddedServer) -> None:
    lost = threading.Event()
    with opened(own_server.credentials(Role.OPERATOR), on_disconnect=lost.set) as lane:
        heard = threading.Event()
        lane.subscribe("lane.outlast", lambda _each: heard.set())

        def read() -> None:
            LaneReaders(lane).read_while(lambda: not heard.is_set(), lambda _callback: None, TIMEOUT_S)

        reader = threading.Thread(target=read)
        reader.start()
        own_server.stop()
        assert lost.wait(TIMEOUT_S)
        own_server.start()
        lane.wait_connected(TIMEOUT_S)
        lane.publish("lane.outlast", b"")
        reader.join(TIMEOUT_S)
        assert not reader.is_alive()


def test_a_server_that_says_nothing_is_given_up(own_server: EmbeddedServer) -> None:
    lost = threading.Event()
    with opened(own_server.credentials(Role.OPERATOR), on_disconnect=lost.set, pings=PingTiming(0.05)) as lane:
        seen(lane)
        freeze_server(own_server)
        assert lost.wait(TIMEOUT_S)
        kill_server(own_server)


def test_a_writer_is_let_go_when_the_server_takes_nothing(own_server: EmbeddedServer) -> None:
    lost = threading.Event()
    with opened(own_server.credentials(Role.OPERATOR), on_disconnect=lost.set, pings=PingTiming(0.1)) as lane:
        freeze_server(own_server)

        def write() -> None:
            with contextlib.suppress(DisconnectedError):
                while True:
                    lane.publish("lane.stalled", bytes(1_000_000))

        writers = [threading.Thread(target=write) for _ in range(3)]
        for writer in writers:
            writer.start()
        assert lost.wait(TIMEOUT_S)
        for writer in writers:
            writer.join(TIMEOUT_S)
            assert not writer.is_alive()
        kill_server(own_server)


def test_a_thread_that_is_interrupted_leaves_no_half_message(address: BusAddress) -> None:
    lost = threading.Event()
    with opened(address, on_disconnect=lost.set) as lane:
        interrupted = threading.Event()

        def interrupt(_delivery: Delivery) -> None:
            interrupted.set()
            raise KeyboardInterrupt

        lane.subscribe("lane.interrupt", interrupt)
        wait_until(lambda: lane.turns.holder is not None)
        came = threading.Event()
        lane.turns.ask(came.set)
        lane.wake()
        assert came.wait(TIMEOUT_S)
        lane.publish("lane.interrupt", b"")
        with pytest.raises(KeyboardInterrupt):
            receive_until(lane, interrupted)
        lane.leave(came.set)
        assert lost.wait(TIMEOUT_S)
        lane.wait_connected(TIMEOUT_S)
        seen(lane)


def test_a_failing_callback_is_logged_and_others_go_on(address: BusAddress, caplog: pytest.LogCaptureFixture) -> None:
    with opened(address) as lane:
        lane.subscribe("lane.fails", lambda _each: 1 / 0)
        echo(lane, "lane.goes-on")
        asker = Asker(lane, "_INBOX.lane-fails")
        lane.publish("lane.fails", b"")
        answer = asker.ask("lane.goes-on", b"on")
        assert answer is not None
        assert answer.data == b"on"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_leaves_the_connection_alone(address: BusAddress) -> None:
    with opened(address) as lane:
        echo(lane, "lane.fork")
        asker = Asker(lane, "_INBOX.lane-fork")
        program = os.fork()
        if program == 0:
            status = 1
            try:
                lane.publish("lane.fork", b"child")
            except ClosedError as error:
                status = 0 if "was forked" in str(error) else 2
            finally:
                lane.close()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == 0
        answer = asker.ask("lane.fork", b"parent")
        assert answer is not None
        assert answer.data == b"parent"


# ---- servers of other kinds -----------------------------------------------------------------------------


def test_pings_are_answered_whether_anybody_reads_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes] = []
    add = Line.add

    def noted(line: Line, data: bytes) -> None:
        add(line, data)
        if data == wire.PONG:
            answers.append(data)

    monkeypatch.setattr(Line, "add", noted)
    patient = 'ping_interval: "50ms"\nping_max: 200\n'  # where the machine is busy, an answer may be late
    with configured(tmp_path, patient) as port, opened(BusAddress(f"nats://127.0.0.1:{port}")) as lane:
        wait_until(lambda: len(answers) > 3, TIMEOUT_S)
        wait_until(lambda: lane.turns.holder is not None)
        came = threading.Event()
        lane.turns.ask(came.set)
        lane.wake()
        assert came.wait(TIMEOUT_S)
        lane.leave(came.set)  # from here on the keeper has to see that no thread reads
        before = len(answers)
        wait_until(lambda: len(answers) > before + 3, TIMEOUT_S)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(["openssl", "req", "-x509", *key, *names, *files, "-days", "2"], check=True, capture_output=True)
    return folder


def test_many_threads_over_tls(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = f'cert_file: "{certificates}/cert.pem", key_file: "{certificates}/key.pem"'
    with configured(tmp_path, f"tls {{ {files} }}\nauthorization {{ user: me, password: secret }}\n") as port:
        address = BusAddress(f"tls://127.0.0.1:{port}", "me", "secret")
        stranger = Lane(address, "test")
        stranger.start()
        wait_until(lambda: stranger.error, TIMEOUT_S)
        with pytest.raises(ConnectError, match="signed by an authority that is not known here"):
            stranger.wait_connected(0)
        stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
        with opened(address) as lane, opened(address) as other:
            echo(other, "lane.tls")
            seen(other)
            asker = Asker(lane, "_INBOX.lane-tls")
            wrong: list[object] = []

            def work(thread: int) -> None:
                for size in (1, 100, 20_000, 300_000) * 10:
                    data = bytes([thread]) * size
                    answer = asker.ask("lane.tls", data)
                    if answer is None or answer.data != data:
                        wrong.append(answer)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S)
            assert wrong == []
