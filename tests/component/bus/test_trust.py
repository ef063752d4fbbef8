"""Signed tokens at a real server: what a user may do, and how its credentials are taken back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import BusError, CredentialsError
from fluster_bus.core.roles import Permissions, Role
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.grants import Export
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority, publish_accounts
from fluster_bus.trust.tokens import user_token
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

EVERYTHING = Permissions((">",), (">",))
OF_A_NAMESPACE = Permissions(
    ("fluster.{{tag(ns)}}.>", "_INBOX.{{tag(ns)}}.{{name()}}.>"),
    ("fluster.{{tag(ns)}}.>", "_INBOX.{{tag(ns)}}.{{name()}}.>"),
)
FLOWS = (Export("$JS.API.>", many_answers=True), Export("$KV.>"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", {Role.OPERATOR: EVERYTHING, Role.CLIENT: OF_A_NAMESPACE}, FLOWS)


@pytest.fixture
def server(authority: Authority) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(authority=authority) as server:
        yield server


def _address(server: EmbeddedServer, authority: Authority, role: Role, name: str, *namespaces: str) -> BusAddress:
    credentials = authority.issue(role, name, namespaces)
    return BusAddress(f"nats://127.0.0.1:{server.port}", token=credentials.token, seed=credentials.seed)


@pytest.fixture
async def operator(server: EmbeddedServer, authority: Authority) -> AsyncIterator[Bus]:
    bus = await Bus.connect(_address(server, authority, Role.OPERATOR, "operator"), name="operator")
    yield bus
    await bus.close()


@pytest.fixture
async def heard(operator: Bus) -> list[str]:
    """The subjects of all that is published below `fluster.`, and below `extra.`, from now on."""
    subjects: list[str] = []
    for prefix in ("fluster", "extra"):
        await operator.subscribe(f"{prefix}.>", lambda message: subjects.append(message.subject))
    await operator.flush()
    return subjects


async def test_users_that_are_issued_while_the_server_runs_may_what_their_role_may_in_their_namespaces(
    server: EmbeddedServer, authority: Authority, heard: list[str]
) -> None:
    alice = await Bus.connect(_address(server, authority, Role.CLIENT, "alice", "one", "Two"), name="alice")
    for namespace in ("one", "three", "Two"):
        await alice.publish(f"fluster.{namespace}.jobs.submit")
    await alice.flush()
    await wait_until_async(lambda: len(heard) == 2)
    assert heard == ["fluster.one.jobs.submit", "fluster.Two.jobs.submit"]
    await alice.close()


async def test_the_streams_of_the_other_account_are_there(operator: Bus) -> None:
    table = await operator.jetstream.create_key_value(bucket="test")
    await table.put("key", b"value")
    assert (await table.get("key")).value == b"value"


async def test_a_direct_connection_shows_a_token_as_well(server: EmbeddedServer, authority: Authority) -> None:
    address = _address(server, authority, Role.CLIENT, "alice", "one")
    (line,) = Dialler(address, "alice").attempts()
    assert isinstance(line, Line)
    other = authority.issue(Role.CLIENT, "bob", ["one"])
    (refused,) = Dialler(BusAddress(address.url, token=address.token, seed=other.seed), "mallory").attempts()
    assert isinstance(refused, CredentialsError)


@contextlib.asynccontextmanager
async def _refusing(server_port: int, times: int, *, is_silent_then: bool = False) -> AsyncIterator[int]:
    """The port of the server as one that refuses so many connections first, as one does that has just joined its group."""
    left = times
    serving: set[asyncio.Task[None] | None] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        serving.add(asyncio.current_task())
        if is_silent_then and not left:
            await reader.read()
            writer.close()
            return
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", server_port)
        if left:
            left -= 1
            writer.write(await to_reader.readline())  # its INFO
            for _sent in ("CONNECT", "PING"):  # a server that closes with something unread takes back what it has sent
                await reader.readline()
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            for each in (writer, to_writer):
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            return
        await asyncio.gather(carry(reader, to_writer), carry(to_reader, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as front:
        yield front.sockets[0].getsockname()[1]
        # Python 3.11 does not wait for them, and what a loop that ends leaves open is an error in the next test.
        await asyncio.wait_for(asyncio.gather(*(each for each in serving if each is not None)), 60)


@pytest.mark.parametrize(("times", "is_refused"), [(1, False), (2, True)])
async def test_one_refusal_is_not_believed_of_a_server_that_may_have_just_joined_its_group(
    server: EmbeddedServer, authority: Authority, times: int, *, is_refused: bool
) -> None:
    made = authority.issue(Role.CLIENT, "alice", ["one"])
    for connects in ("bus", "line"):
        async with _refusing(server.port, times) as port:
            address = BusAddress(f"nats://127.0.0.1:{port}", token=made.token, seed=made.seed)
            if connects == "line":
                (line,) = await asyncio.to_thread(list, Dialler(address, "alice").attempts())
                assert isinstance(line, CredentialsError if is_refused else Line)
                if isinstance(line, Line):
                    line.shut()
            elif is_refused:
                with pytest.raises(CredentialsError):
                    await Bus.connect(address, name="alice")
            else:
                await (await Bus.connect(address, name="alice")).close()


async def test_a_refusal_is_told_where_the_server_is_silent_after_it(
    server: EmbeddedServer, authority: Authority
) -> None:
    made = authority.issue(Role.CLIENT, "alice", ["one"])
    async with _refusing(server.port, 1, is_silent_then=True) as port:
        address = BusAddress(f"nats://127.0.0.1:{port}", token=made.token, seed=made.seed)
        with pytest.raises(CredentialsError):
            await Bus.connect(address, name="alice", timeout_s=4)


async def test_a_password_is_refused_once(server: EmbeddedServer) -> None:
    async with _refusing(server.port, 1) as port:
        address = BusAddress(f"nats://127.0.0.1:{port}", "alice", "secret")
        with pytest.raises(CredentialsError):
            await Bus.connect(address, name="alice")


async def test_credentials_travel_as_a_file(server: EmbeddedServer, authority: Authority, tmp_path: Path) -> None:
    _address(server, authority, Role.CLIENT, "alice", "one").save(tmp_path / "alice.json")
    address = BusAddress.parse(str(tmp_path / "alice.json"))
    assert address.user == "alice"
    assert (address.token or "") not in repr(address)
    bus = await Bus.connect(address, name="alice")
    await bus.close()


async def test_who_is_revoked_is_cut_off_and_does_not_come_back(
    server: EmbeddedServer, authority: Authority, operator: Bus
) -> None:
    address = _address(server, authority, Role.CLIENT, "alice", "one")
    alice = await Bus.connect(address, name="alice")
    cut_off = asyncio.Event()
    alice.on_end(cut_off.set)
    authority.revoke("alice")
    await publish_accounts(authority, address.url)
    async with asyncio.timeout(5):  # the bound that operators are promised
        await cut_off.wait()
    with pytest.raises(CredentialsError):
        await Bus.connect(address, name="alice again")
    await alice.close()
    await operator.publish("fluster.one.still-here")
    await operator.flush()
    again = await Bus.connect(_address(server, authority, Role.CLIENT, "alice", "one"), name="a new alice")
    await again.close()


async def test_a_key_that_is_revoked_stays_so_whatever_is_signed_for_it(
    server: EmbeddedServer, authority: Authority
) -> None:
    address = _address(server, authority, Role.CLIENT, "alice", "one")
    authority.revoke("alice")
    await publish_accounts(authority, address.url)
    signed = int(time.time())
    await wait_until_async(lambda: int(time.time()) > signed)  # servers compare whole seconds
    key = Key(address.seed or "")
    again = authority.signer(Role.CLIENT).sign(key.public, "alice", ["one"])
    with pytest.raises(CredentialsError):
        await Bus.connect(BusAddress(address.url, token=again, seed=key.seed), name="alice")


async def test_what_is_revoked_stays_so_when_the_server_starts_again(
    server: EmbeddedServer, authority: Authority
) -> None:
    address = _address(server, authority, Role.CLIENT, "alice", "one")
    authority.revoke("alice")
    await publish_accounts(authority, address.url)
    server.stop()
    server.start()
    with pytest.raises(CredentialsError):
        await Bus.connect(address, name="alice")


async def test_a_role_may_more_once_its_permissions_are_published(
    server: EmbeddedServer, authority: Authority, tmp_path: Path, heard: list[str]
) -> None:
    alice = await Bus.connect(_address(server, authority, Role.CLIENT, "alice", "one"), name="alice")
    more = Permissions((*OF_A_NAMESPACE.publish, "extra.{{tag(ns)}}"), OF_A_NAMESPACE.subscribe)
    newer = Authority(tmp_path / "authority", {Role.OPERATOR: EVERYTHING, Role.CLIENT: more}, FLOWS)
    await publish_accounts(newer, alice.address.url)

    async def gets_through() -> bool:
        with contextlib.suppress(BusError):  # its connection is made anew, as another one
            await alice.publish("extra.one")
            await alice.flush()
        return bool(heard)

    await wait_until_async(gets_through)
    await alice.close()


async def test_a_signer_of_one_role_makes_users_of_that_role_only(
    server: EmbeddedServer, authority: Authority, heard: list[str]
) -> None:
    key, stolen = Key.generate(KeyKind.USER), authority.signer(Role.CLIENT)
    token = user_token(stolen.key, key.public, name="mallory", account=stolen.account, permissions=EVERYTHING)
    address = BusAddress(f"nats://127.0.0.1:{server.port}", token=token, seed=key.seed)
    with pytest.raises(CredentialsError):
        await Bus.connect(address, name="mallory")
    token = stolen.sign(key.public, "mallory", ["one"])
    bus = await Bus.connect(BusAddress(address.url, token=token, seed=key.seed), name="mallory")
    for namespace in ("two", "one"):
        await bus.publish(f"fluster.{namespace}.jobs.submit")
    await bus.flush()
    await wait_until_async(lambda: heard == ["fluster.one.jobs.submit"])
    await bus.close()


async def test_an_expired_token_is_refused(server: EmbeddedServer, authority: Authority) -> None:
    credentials = authority.issue(Role.CLIENT, "alice", ["one"], lifetime_s=1)
    address = BusAddress(f"nats://127.0.0.1:{server.port}", token=credentials.token, seed=credentials.seed)
    await wait_until_async(lambda: not authority.issued()[0].is_good(time.time() - 1))  # a second of grace
    with pytest.raises(CredentialsError):
        await Bus.connect(address, name="alice")


async def test_another_authority_may_neither_issue_nor_publish(server: EmbeddedServer, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", {Role.CLIENT: OF_A_NAMESPACE}, FLOWS)
    address = _address(server, other, Role.CLIENT, "alice", "one")
    with pytest.raises(CredentialsError):
        await Bus.connect(address, name="alice")
    with pytest.raises(CredentialsError):
        await publish_accounts(other, address.url)
