"""Join tokens at a real server and a real controller: exchanged, refused, and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import CredentialsError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages.workers import JoinReply, JoinRequest
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.streams import join_tokens_table
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.join_register import JoinRegister
from fluster_bus.trust.join_tokens import JoinedFolder, JoinToken, join
from fluster_bus.trust.signer import read_signing_keys, write_signing_keys
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.controller import Controller, ControllerConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.of_cluster(tmp_path / "authority")


@pytest.fixture
def server(authority: Authority) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(authority=authority) as server:
        yield server


@pytest.fixture
def register(server: EmbeddedServer, authority: Authority) -> JoinRegister:
    return JoinRegister(authority, f"nats://127.0.0.1:{server.port}")


def _address(server: EmbeddedServer, authority: Authority, role: Role, name: str, *namespaces: str) -> BusAddress:
    made = authority.issue(role, name, namespaces)
    return BusAddress(f"nats://127.0.0.1:{server.port}", token=made.token, seed=made.seed)


@pytest.fixture(params=[True])
def has_keys(request: pytest.FixtureRequest) -> bool:
    """Whether the controller can sign."""
    return bool(request.param)


@pytest.fixture
async def controller(
    server: EmbeddedServer, authority: Authority, tmp_path: Path, has_keys: bool
) -> AsyncIterator[Controller]:
    address = _address(server, authority, Role.SERVICE, "controllers")
    write_signing_keys(authority, tmp_path / "signing-keys.json")
    signers = read_signing_keys(tmp_path / "signing-keys.json") if has_keys else {}
    bus = await Bus.connect(address, name="controller")
    controller = Controller(bus, ControllerConfig(address=address, timing=LOCAL_TIMING, signers=signers))
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(controller.run(ready.set))
        await ready.wait()
        yield controller
        running.cancel()
    await bus.close()


def _public(folder: Path) -> str:
    return JoinedFolder(folder).keys(["default"])[0].public


async def _uses(controller: Controller, token: JoinToken) -> dict[str, str]:
    row = await join_tokens_table(controller.bus).get(buckets.join_token_key(token.token_id))
    assert row is not None
    return dict(row.value.used_by)


async def test_a_token_is_exchanged_for_the_credentials_of_one_worker(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=60)
    folder = JoinedFolder(tmp_path / "w1")
    await join(JoinToken.parse(token.to_text()), "w1", folder)
    worker = await Bus.connect(BusAddress.parse(str(folder.worker_file)), name="w1")
    assert (worker.address.user, worker.address.namespaces) == ("w1", ("default",))
    await worker.request(buckets.bucket_key(buckets.WORKERS_BUCKET, "w1"), b"{}")  # its own row
    with pytest.raises(CredentialsError):
        await worker.request(buckets.bucket_key(buckets.WORKERS_BUCKET, "w2"), b"{}")
    await worker.close()
    job = await Bus.connect(BusAddress.parse(str(folder.job_files()["default"])), name="job")
    await job.request(subjects.jobs_verb("default", "list"), b"{}")
    await job.close()
    (listed,) = await register.tokens()
    assert list(listed.used_by.values()) == ["w1"]


async def test_who_asks_again_uses_the_token_once(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=60)
    for _ in range(3):  # as after answers that were lost
        await join(token, "w1", JoinedFolder(tmp_path / "w1"))
    assert list((await _uses(controller, token)).values()) == ["w1"]
    with pytest.raises(ServiceError, match="used up: 1 of 1"):
        await join(token, "w2", JoinedFolder(tmp_path / "w2"))


async def test_of_many_at_once_as_many_join_as_there_are_uses(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=3, lifetime_s=60)
    names = [f"w{number}" for number in range(8)]
    outcomes = await asyncio.gather(
        *(join(token, name, JoinedFolder(tmp_path / name)) for name in names), return_exceptions=True
    )
    refused = [each for each in outcomes if isinstance(each, ServiceError)]
    assert (len(refused), outcomes.count(None)) == (5, 3)
    uses = await _uses(controller, token)
    assert len(uses) == 3
    more = await register.create(["default"], uses=5, lifetime_s=60)
    for name, outcome in zip(names, outcomes, strict=True):
        if outcome is not None:  # their ids are free still
            (tmp_path / name / "keys.json").unlink()
            await join(more, name, JoinedFolder(tmp_path / name))


async def test_nobody_takes_the_id_of_another(
    controller: Controller, server: EmbeddedServer, authority: Authority, register: JoinRegister, tmp_path: Path
) -> None:
    _address(server, authority, Role.WORKER, "made-by-hand", "default")
    _address(server, authority, Role.AUTOSCALER, "scaler")
    token = await register.create(["default"], uses=5, lifetime_s=60)
    await join(token, "w1", JoinedFolder(tmp_path / "w1"))
    with pytest.raises(ServiceError, match="the worker 'w1' is another's"):
        await join(token, "w1", JoinedFolder(tmp_path / "thief"))
    for name in ("made-by-hand", "controllers", "scaler", token.token_id):
        with pytest.raises(ServiceError, match=f"there is a worker or user '{name}' already"):
            await join(token, name, JoinedFolder(tmp_path / "thief"))
    assert list((await _uses(controller, token)).values()) == ["w1"]


async def test_a_token_is_good_for_its_namespaces_until_its_time(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=60)
    with pytest.raises(ServiceError, match="good for default, not for other"):
        await join(token, "w1", JoinedFolder(tmp_path / "w1"), ["other"])
    table, key = join_tokens_table(controller.bus), buckets.join_token_key(token.token_id)
    row = await table.get(key)
    assert row is not None
    await table.put(key, row.value.model_copy(update={"expires_at": 1.0}))  # before its user's own credentials end
    with pytest.raises(ServiceError, match="has expired at 1970-01-01"):
        await join(token, "w1", JoinedFolder(tmp_path / "w1"))
    await table.delete(key)
    with pytest.raises(ServiceError, match="is not known: it was revoked"):
        await join(token, "w1", JoinedFolder(tmp_path / "w1"))


async def test_a_token_that_is_revoked_is_refused_by_the_server(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=2, lifetime_s=60)
    await join(token, "w1", JoinedFolder(tmp_path / "w1"))
    assert await register.revoke_token(token.token_id) == ("w1",)
    with pytest.raises(CredentialsError):
        await join(token, "w2", JoinedFolder(tmp_path / "w2"))
    worker = await Bus.connect(BusAddress.parse(str(tmp_path / "w1/worker.creds")), name="w1")  # it stays
    await worker.close()
    assert await register.revoke_token(token.token_id) == ()
    with pytest.raises(CredentialsError, match="unknown join token 'join-other'"):
        await register.revoke_token("join-other")


async def test_a_worker_that_joined_is_revoked_by_its_id_with_its_jobs(
    controller: Controller, register: JoinRegister, authority: Authority, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=2, lifetime_s=60)
    folder = JoinedFolder(tmp_path / "w1")
    await join(token, "w1", folder)
    files = (folder.worker_file, folder.job_files()["default"])
    cut_off = []
    for file in files:
        bus = await Bus.connect(BusAddress.parse(str(file)), name=file.name)
        cut_off.append((bus, asyncio.Event()))
        bus.on_end(cut_off[-1][1].set)
    revoked = await register.revoke_user("w1")
    assert [(each.name, each.role) for each in revoked] == [("w1", "worker"), ("job-w1", "job")]
    async with asyncio.timeout(5):  # the bound that operators are promised
        for _, event in cut_off:
            await event.wait()
    for bus, _ in cut_off:
        await bus.close()
    for file in files:
        with pytest.raises(CredentialsError):
            await Bus.connect(BusAddress.parse(str(file)), name="again")
    with pytest.raises(ServiceError, match="the worker 'w1' were revoked"):
        await join(token, "w1", folder)
    with pytest.raises(CredentialsError, match="unknown user 'w1'"):
        await register.revoke_user("w1")
    await join(token, "w1", JoinedFolder(tmp_path / "new"))  # its id is free for another key
    assert [each.name for each in await register.revoke_user("w1")] == ["w1", "job-w1"]


@pytest.mark.parametrize("has_keys", [False], indirect=True, ids=["no-keys"])
async def test_a_controller_without_keys_says_so(
    controller: Controller, register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=60)
    with pytest.raises(ServiceError, match="no keys to sign with: start all with --signing-keys"):
        await join(token, "w1", JoinedFolder(tmp_path / "w1"))


async def test_what_is_expired_is_forgotten_with_the_next_token(controller: Controller, register: JoinRegister) -> None:
    old = await register.create(["default"], uses=1, lifetime_s=60)
    table, key = join_tokens_table(controller.bus), buckets.join_token_key(old.token_id)
    row = await table.get(key)
    assert row is not None
    await table.put(key, row.value.model_copy(update={"expires_at": 1.0}))
    new = await register.create(["default"], uses=1, lifetime_s=60)
    assert [each.token_id for each in await register.tokens()] == [new.token_id]


async def test_a_token_cannot_be_without_end(controller: Controller, register: JoinRegister) -> None:
    for wrong in ({"uses": 0}, {"uses": 1_001}, {"lifetime_s": 1e9}):
        with pytest.raises(CredentialsError, match="a join token is for 1 to 64 namespaces"):
            await register.create(["default"], **{"uses": 1, "lifetime_s": 60, **wrong})  # type: ignore[arg-type]


async def test_what_is_asked_is_bounded(controller: Controller, register: JoinRegister) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=60)
    bus = await Bus.connect(token.address, name="test")
    try:
        subject = subjects.join(token.token_id)
        for data, code in ((b"x" * (65 << 10), "MessageTooLargeError"), (b"nonsense", "InvalidMessageError")):
            with pytest.raises(ServiceError) as caught:
                await bus.request(subject, data)
            assert caught.value.code == code
        with pytest.raises(ServiceError):
            await bus.ask(subject, JoinRequest(worker_id="w1", key="x" * 56, job_keys={"default": "y" * 56}), JoinReply)
    finally:
        await bus.close()
