"""The attacker has signed credentials of one namespace, or a join token for one, and chooses names and tokens as it likes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from pydantic import ValidationError

from fluster.cluster.namespaces import NamespaceAdmin
from fluster_bus import grants
from fluster_bus.access.address import BusAddress
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import InvalidNameError, ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import Namespace, ResourceConfig
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.tokens import user_token
from fluster_services.capacity import needed
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.controller import Controller, ControllerConfig
from fluster_services.controller.state.shares import Amount
from tests.component.bus.test_permissions import OURS, THEIRS, Peer
from tests.component.guarded_server import plain_options

pytestmark = pytest.mark.anyio

Connect = Callable[[str, str], Awaitable[Peer]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.of_cluster(tmp_path_factory.mktemp("signed") / "authority")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(namespaces=(OURS, THEIRS), authority=authority) as server:
        yield server


@pytest.fixture
async def connect(server: EmbeddedServer) -> AsyncIterator[Connect]:
    """A plain client with that token and seed."""
    async with AsyncExitStack() as stack:

        async def make(token: str, seed: str) -> Peer:
            refusals: list[str] = []

            async def on_error(error: Exception) -> None:
                refusals.append(str(error))

            client = Client()
            stack.push_async_callback(client.close)
            address = BusAddress(f"nats://127.0.0.1:{server.port}", token=token, seed=seed)
            await client.connect(
                servers=address.servers, **plain_options(address), error_cb=on_error, allow_reconnect=False
            )
            return Peer(client, refusals)

        yield make


async def _refused(peer: Peer, *, send: list[str], hear: list[str]) -> None:
    for subject in send:
        await peer.client.publish(subject, b"{}")
        assert len(await peer.refusals()) == 1, subject
    for subject in hear:
        await peer.client.subscribe(subject)
        assert len(await peer.refusals()) == 1, subject


# ---- names and tokens -----------------------------------------------------------------------------------

ODD = [
    "*",
    ">",
    "a.b",
    "a.*",
    "{{name()}}",
    "{{tag(ns)}}",
    "a b",
    "a\tb",
    "",
    "a" * 129,
    "ä",
    "worker:w1",
    "a\n",
    "a\r\nPUB",
]


@pytest.mark.parametrize("odd", ODD)
def test_no_name_and_no_namespace_widens_a_template(authority: Authority, odd: str) -> None:
    key = Key.generate(KeyKind.USER).public
    for role in (Role.CLIENT, Role.JOB, Role.WORKER, Role.GATEWAY):
        with pytest.raises(InvalidNameError):
            authority.signer(role).sign(key, odd, [OURS])
        with pytest.raises(InvalidNameError):
            authority.signer(role).sign(key, "a", [OURS, odd])
        with pytest.raises(InvalidNameError):
            authority.signer(role).sign(key, "a", [OURS, "sys"])


@pytest.mark.parametrize("case", [str.upper, str.title], ids=["upper", "title"])
async def test_a_namespace_that_differs_in_case_is_another(
    authority: Authority, connect: Connect, case: Callable[[str], str]
) -> None:
    key = Key.generate(KeyKind.USER)
    peer = await connect(authority.signer(Role.CLIENT).sign(key.public, "x", [case(OURS)]), key.seed)
    await _refused(peer, send=[subjects.jobs_submit(OURS)], hear=[subjects.watch_any(OURS)])


@pytest.mark.parametrize("issuer", ["itself", "another user", "another authority", "the account of users, by name"])
async def test_no_tenant_signs_for_another(authority: Authority, connect: Connect, tmp_path: Path, issuer: str) -> None:
    own, thief = Key.generate(KeyKind.USER), Key.generate(KeyKind.USER)
    account = authority.signer(Role.JOB).account
    everything = grants.granted(Role.OPERATOR, (), "x", workers="x")
    keys = {
        "itself": thief,
        "another user": own,
        "another authority": Authority.of_cluster(tmp_path / "other").signer(Role.JOB).key,
        "the account of users, by name": Key.generate(KeyKind.ACCOUNT),
    }
    for permissions in (None, everything):
        token = user_token(
            keys[issuer], thief.public, name="x", account=account, tags=[f"ns:{THEIRS}"], permissions=permissions
        )
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            await connect(token, thief.seed)


async def test_a_token_whose_words_were_changed_is_refused(authority: Authority, connect: Connect) -> None:
    ours, theirs = (authority.issue(Role.JOB, f"changed-{each}", [each]) for each in (OURS, THEIRS))
    head, body, signature = ours.token.split(".")
    for token in (
        f"{head}.{theirs.token.split('.')[1]}.{signature}",
        f"{head}.{body}.{theirs.token.split('.')[2]}",
        f"{head}.{body}.",
    ):
        with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
            await connect(token, ours.seed)


async def test_the_key_of_a_role_gives_no_more_than_that_role(authority: Authority, connect: Connect) -> None:
    signer, key = authority.signer(Role.JOB), Key.generate(KeyKind.USER)
    everything = grants.granted(Role.OPERATOR, (), "x", workers="x")
    token = user_token(
        signer.key, key.public, name="x", account=signer.account, tags=[f"ns:{OURS}"], permissions=everything
    )
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await connect(token, key.seed)


# ---- a worker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["controllers", "me", "scaler", "join-1"])
async def test_a_worker_with_the_name_of_another_user_hears_nothing_that_is_for_that_one(
    authority: Authority, connect: Connect, name: str
) -> None:
    """Who joins by a token chooses the name, and could so read what a controller is answered."""
    key = Key.generate(KeyKind.USER)
    worker = await connect(authority.signer(Role.WORKER).sign(key.public, name, [OURS]), key.seed)
    for role in (Role.SERVICE, Role.OPERATOR, Role.AUTOSCALER, Role.JOIN, Role.GATEWAY):
        theirs = [THEIRS] if role.is_confined else []
        token = authority.signer(role).sign(Key.generate(KeyKind.USER).public, name, theirs)
        inbox = BusAddress("nats://127.0.0.1", token=token, seed=key.seed).inbox_prefix()
        await _refused(worker, send=[], hear=[subjects.below(inbox)])


async def test_a_worker_of_one_namespace_keeps_to_it_and_to_itself(authority: Authority, connect: Connect) -> None:
    made = authority.issue(Role.WORKER, "w1", [OURS])
    worker = await connect(made.token, made.seed)
    await _refused(
        worker,
        send=[
            subjects.jobs_submit(THEIRS),
            subjects.ensure_namespace(THEIRS),
            subjects.logs(THEIRS, "train-1", "0", "1", "stdout"),
            subjects.result_part(THEIRS, "train-1", 0, 1, 0),
            subjects.watch_progress(THEIRS, "train-1", "0"),
            f"{subjects.inbox_prefix('client', THEIRS)}.token",
            server_subjects.direct_get(buckets.secrets_stream(THEIRS)),
            server_subjects.direct_get(buckets.results_stream(THEIRS)),
            buckets.bucket_key(buckets.jobs_bucket(THEIRS), buckets.task_key("train-1", 0)),
            buckets.bucket_key(buckets.jobs_bucket(OURS), "train-1"),
            buckets.bucket_key(buckets.jobs_bucket(OURS), buckets.VERDICTS_KEY),
            buckets.bucket_key(buckets.jobs_bucket(OURS), buckets.LEADER_KEY),
            buckets.bucket_key(buckets.CONTROLLERS_BUCKET, buckets.LEADER_KEY),
            buckets.bucket_key(buckets.WORKERS_BUCKET, "w2"),
            buckets.bucket_key(buckets.WORKERS_BUCKET, "w1.more"),
            subjects.heartbeats("w2"),
            *(subjects.worker_verb("w2", verb) for verb in subjects.WORKER_VERBS),
            *(subjects.namespaces_verb(verb) for verb in subjects.NAMESPACE_VERBS),
            subjects.join("join-1"),
            "$JS.API.STREAM.NAMES",
            f"$JS.API.STREAM.SNAPSHOT.{buckets.results_stream(OURS)}",
            server_subjects.CLAIMS_UPDATE,
        ],
        hear=[
            ">",
            "fluster.>",
            "$SYS.>",
            "$JS.>",
            "$KV.>",
            "_INBOX.>",
            "_INBOX.sys.>",
            "_INBOX.sys.*.>",
            subjects.dispatch_any(THEIRS),
            subjects.watch_any(THEIRS),
            subjects.watch_workers(),
            subjects.watch_joins(),
            subjects.watch_namespaces(),
            subjects.heartbeats("w2"),
            subjects.worker_verb("w2", "run"),
            subjects.worker_verb("*", "run"),
            subjects.jobs_submit(OURS),
        ],
    )
    await worker.client.subscribe(f"{subjects.inbox_prefix(subjects.worker_user('w1'))}.*")
    assert await worker.refusals() == []


# ---- a user of several namespaces, and one without ------------------------------------------------------


async def test_a_client_of_two_namespaces_may_what_clients_of_these_may_and_no_more(
    authority: Authority, connect: Connect
) -> None:
    made = authority.issue(Role.CLIENT, "both", [OURS, THEIRS])
    peer = await connect(made.token, made.seed)
    for namespace in (OURS, THEIRS):
        await peer.client.publish(subjects.jobs_verb(namespace, "list"), b"{}")
        await peer.client.subscribe(subjects.watch_any(namespace))
    assert await peer.refusals() == []
    strange = [subjects.jobs_submit("third"), subjects.jobs_verb("third", "list"), subjects.ensure_namespace("third")]
    await _refused(peer, send=strange, hear=["fluster.*.watch.>", subjects.watch_any("third"), f"_INBOX.{OURS}.>"])


@pytest.mark.parametrize("role", [Role.CLIENT, Role.JOB, Role.WORKER, Role.GATEWAY])
async def test_a_user_without_a_namespace_has_none(authority: Authority, connect: Connect, role: Role) -> None:
    """`Signer` makes none; who has the key of the role could."""
    signer, key = authority.signer(role), Key.generate(KeyKind.USER)
    token = user_token(signer.key, key.public, name="x", account=signer.account)
    try:
        peer = await connect(token, key.seed)
    except nats.errors.Error:
        return
    send = [subjects.jobs_submit(OURS), subjects.result_part(OURS, "a", 0, 1, 0), subjects.actor_any(OURS, "a", "b")]
    await _refused(peer, send=send, hear=[subjects.watch_any(OURS), subjects.actors_of(OURS), "fluster.>"])


async def test_signed_tenants_may_send_and_hear_nothing_of_the_lists(authority: Authority, connect: Connect) -> None:
    """Those of test_permissions are tried there with signed credentials, too; here is what servers and joins add."""
    more = [
        subjects.join("join-1"),
        server_subjects.CLAIMS_UPDATE,
        "$SYS.REQ.SERVER.PING",
        "$SYS.REQ.USER.INFO",
        "$JS.SNAPSHOT.ACK.a.b",
        "$JS.SNAPSHOT.RESTORE.a.b",
        "$JS.API.META.LEADER.STEPDOWN",
        subjects.vm_trouble(),
        subjects.ROOM,
        *(subjects.namespaces_verb(verb) for verb in subjects.NAMESPACE_VERBS),
        *(subjects.worker_verb("w1", verb) for verb in subjects.WORKER_VERBS),
        buckets.bucket_key(buckets.JOINS_BUCKET, buckets.join_token_key("join-1")),
        buckets.bucket_key(buckets.CONTROLLERS_BUCKET, buckets.LEADER_KEY),
        f"{subjects.inbox_prefix(subjects.worker_user('w1'))}.token",
    ]
    hear = [
        subjects.heartbeats(),
        subjects.dispatch_any(OURS),
        subjects.watch_joins(),
        subjects.watch_namespaces(),
        subjects.watch_controllers(),
        subjects.below(subjects.inbox_prefix(subjects.worker_user("w1"))),
        "$SRV.>",
        subjects.events_of_all(OURS),
        subjects.secrets(OURS),
        subjects.results_of_all(OURS),
        subjects.durable_calls_of_all(OURS),
    ]
    for role in (Role.JOB, Role.CLIENT):
        made = authority.issue(role, f"more-{role}", [OURS])
        await _refused(await connect(made.token, made.seed), send=more, hear=hear)


# ---- a namespace that is dropped ------------------------------------------------------------------------


async def test_credentials_of_a_dropped_namespace_revive_nothing_and_are_good_for_the_next_of_its_name(
    tmp_path: Path,
) -> None:
    """The latter is documented: who drops a namespace revokes them."""
    authority = Authority.of_cluster(tmp_path / "authority")
    team = Namespace("team")
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(authority=authority))

        async def connected(role: Role, name: str, *namespaces: str) -> Bus:
            made = authority.issue(role, name, namespaces)
            address = BusAddress(f"nats://127.0.0.1:{server.port}", token=made.token, seed=made.seed)
            bus = await Bus.connect(address, name=name)
            stack.push_async_callback(bus.close)
            return bus

        bus = await connected(Role.SERVICE, "controllers")
        controller = Controller(bus, ControllerConfig(address=bus.address, timing=LOCAL_TIMING))
        operator, tenant = await connected(Role.OPERATOR, "me"), await connected(Role.CLIENT, "old", team)
        admin, ready = NamespaceAdmin(operator), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(controller.run(ready.set))
            await ready.wait()
            await admin.add(team)
            assert await tenant.request(subjects.jobs_verb(team, "list"), b"{}")
            await admin.drop(team)
            for subject in (subjects.ensure_namespace(team), subjects.jobs_verb(team, "list")):
                with pytest.raises(ServiceError, match="has no namespace 'team'"):
                    await tenant.request(subject, b"{}")
            assert [each.record.name for each in await admin.list()] == ["default"]
            assert "KV_" + buckets.jobs_bucket(team) not in {
                each.config.name for each in await operator.jetstream.streams_info()
            }
            await admin.add(team)
            assert await tenant.request(subjects.jobs_verb(team, "list"), b"{}")
            running.cancel()


# ---- resources that are hardly any ----------------------------------------------------------------------


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "-1", "1e400", '"x"', "null", "[1]"])
@pytest.mark.parametrize("field", ["cpu", "memory", "disk"])
def test_what_is_no_amount_is_refused(field: str, odd: str) -> None:
    with pytest.raises(ValidationError):
        ResourceConfig.model_validate_json(f'{{"{field}": {odd}}}')


@pytest.mark.parametrize("odd", ["1e-9", "-0.0", "1e-300", '"0.0000001"', "0.0001", "4096"])
def test_a_hardly_noticeable_task_takes_no_less_than_nothing_of_a_quota(odd: str) -> None:
    for field in ("cpu", "memory") if odd != '"0.0000001"' else ("cpu",):
        need = needed(ResourceConfig.model_validate_json(f'{{"{field}": {odd}}}'), Namespace(OURS))
        amount = Amount.of(need, 1_000)
        assert amount.memory >= 1_000 * (16 << 20), "the least that a task is given"
        assert 0 <= amount.milli_cpus == 1_000 * round(need.cpu * 1000)
        assert str(need.cpu)[0] != "-", "a class of offers is named for it"
