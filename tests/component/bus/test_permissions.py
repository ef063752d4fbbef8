"""What each role may and may not do, tried at a real server with clients that know nothing of Fluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.roles import Role, User
from fluster_bus.core.stream_bounds import BUNDLES, PAYLOADS
from fluster_bus.storage import provisioning
from tests.component.guarded_server import KINDS, WORKER, GuardedServer, guarded_server, plain_options

pytestmark = pytest.mark.anyio

OURS, THEIRS = "default", "other"
TIMEOUT_S = 60


class Peer:
    """A plain client, and what the server refused it."""

    def __init__(self, client: Client, refusals: list[str]) -> None:
        self.client = client
        self._refusals = refusals

    async def refusals(self) -> list[str]:
        """What was refused since the last time; the server answers in order, so after a flush all of it is here."""
        for _ in range(2):  # nats-py sends a flush's ping ahead of what it still holds back; that is out at the second
            await self.client.flush(TIMEOUT_S)
        refused, self._refusals[:] = list(self._refusals), []
        return refused

    async def ask(self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None) -> Msg:
        return await self.client.request(subject, data, TIMEOUT_S, headers=headers)

    async def listen(self, subject: str, queue: str = "") -> asyncio.Queue[Msg]:
        heard: asyncio.Queue[Msg] = asyncio.Queue()
        await self.client.subscribe(subject, queue, cb=heard.put)
        assert await self.refusals() == []
        return heard


Connect = Callable[..., Awaitable[Peer]]


async def _connect(address: BusAddress) -> Peer:
    refusals: list[str] = []

    async def on_error(error: Exception) -> None:
        refusals.append(str(error))

    client = Client()
    try:
        await client.connect(
            servers=address.servers,
            **plain_options(address),
            # The operator's as the plain `nats` command: it names no namespace, so any may answer.
            inbox_prefix=b"_INBOX" if address.user == "operator" else address.inbox_prefix().encode(),
            error_cb=on_error,
            connect_timeout=TIMEOUT_S,
            allow_reconnect=False,
        )
    except nats.errors.Error:
        await client.close()  # which a refused connect leaves to its caller
        raise
    return Peer(client, refusals)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServer]:
    """Two namespaces with their buckets and streams, and a record in each bucket."""
    with guarded_server(request.param, (OURS, THEIRS), tmp_path_factory.mktemp("server")) as server:
        asyncio.run(_furnish(server))
        yield server


async def _furnish(server: GuardedServer) -> None:
    bus = await Bus.connect(server.credentials(Role.SERVICE), name="test")
    await provisioning.ensure_system(bus)
    for namespace in (OURS, THEIRS):
        await provisioning.ensure_namespace(bus, namespace)
        for key in (_record(namespace), _entry(namespace)):
            await bus.request(key, b'"untouched"')
    await bus.close()


def _record(namespace: str) -> str:
    return buckets.bucket_key(buckets.jobs_bucket(namespace), "train-1")


def _seat(namespace: str) -> str:
    return buckets.bucket_key(buckets.actors_bucket(namespace), buckets.seat_key("ledger"))


def _entry(namespace: str, name: str = "calculator") -> str:
    return buckets.bucket_key(buckets.endpoints_bucket(namespace), f"{name}.-.0.0.e1")


@pytest.fixture
async def connect(server: GuardedServer) -> AsyncIterator[Connect]:
    """Makes clients by role, and closes them."""
    async with AsyncExitStack() as stack:

        async def make(role: Role, namespace: str | None = None) -> Peer:
            peer = await _connect(server.credentials(role, namespace))
            stack.push_async_callback(peer.client.close)
            return peer

        yield make


async def _stored(operator: Peer, bucket: str, subject: str) -> bytes:
    return (await operator.ask(f"{server_subjects.direct_get(buckets.bucket_stream(bucket))}.{subject}")).data


# ---- at the door ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "password"), [(None, None), ("operator", "wrong"), ("nobody", "wrong"), ("operator", ""), ("job_new", "")]
)
async def test_who_has_no_credentials_is_refused(server: GuardedServer, user: str | None, password: str | None) -> None:
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await _connect(BusAddress(server.url, user, password))


async def test_what_proves_one_user_is_good_for_that_one_only(server: GuardedServer) -> None:
    job, operator = server.credentials(Role.JOB, OURS), server.credentials(Role.OPERATOR)
    stolen = BusAddress(job.url, "operator", job.password) if job.password else replace(operator, seed=job.seed)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await _connect(stolen)


# ---- what is forbidden ----------------------------------------------------------------------------------

RECORDS = buckets.bucket_stream(buckets.jobs_bucket(OURS))
REGISTRY = buckets.bucket_stream(buckets.endpoints_bucket(OURS))
THEIR_REGISTRY = buckets.bucket_stream(buckets.endpoints_bucket(THEIRS))

# Neither a job nor a client may send there.
NOT_TO_SEND = [
    # the other namespace
    subjects.jobs_submit(THEIRS),
    subjects.jobs_verb(THEIRS, "terminate"),
    subjects.ensure_namespace(THEIRS),
    subjects.endpoints_verb(THEIRS, "register"),
    subjects.workers_list(THEIRS),
    subjects.actor_any(THEIRS, "calculator", "add"),
    subjects.actor_one(THEIRS, "calculator", "e1", "add"),
    subjects.actor_all(THEIRS, "calculator", "add"),
    _entry(THEIRS),
    _record(THEIRS),
    subjects.durable_calls(THEIRS, "ledger"),
    subjects.trim_calls(THEIRS),
    _seat(THEIRS),
    server_subjects.direct_get(buckets.calls_stream(THEIRS)),
    f"{server_subjects.direct_get(buckets.bucket_stream(buckets.actors_bucket(THEIRS)))}.{_seat(THEIRS)}",
    f"{server_subjects.direct_get(THEIR_REGISTRY)}.{_entry(THEIRS)}",
    server_subjects.direct_get(THEIR_REGISTRY),
    server_subjects.direct_get(buckets.logs_stream(THEIRS)),
    subjects.object_part(BUNDLES.name, THEIRS, "0" * 64, 0),
    subjects.object_manifest(BUNDLES.name, THEIRS, "0" * 64),
    subjects.object_part(PAYLOADS.name, THEIRS, "0" * 64, 0),
    server_subjects.direct_get(buckets.objects_stream(PAYLOADS.name, THEIRS)),
    server_subjects.direct_get(buckets.objects_stream(BUNDLES.name, THEIRS)),
    f"{server_subjects.direct_get(buckets.objects_stream(BUNDLES.name, THEIRS))}.{subjects.object_part(BUNDLES.name, THEIRS, '0' * 64, 0)}",
    subjects.result_part(THEIRS, "train-1", 0, 1, 0),
    subjects.secrets(THEIRS, "token"),
    server_subjects.direct_get(buckets.results_stream(THEIRS)),
    f"{User(Role.JOB, THEIRS).inbox[:-1]}token",
    f"{User(Role.CLIENT, THEIRS).inbox[:-1]}token",
    # the cluster's own
    subjects.worker_verb("w1", "look"),
    subjects.heartbeats("w1"),
    subjects.capacity(),
    subjects.dispatch(OURS, "cpu", "any", 0, cpu="c1", memory="m1024"),
    subjects.dispatch(THEIRS, "cpu", "any", 0, cpu="c1", memory="m1024"),
    buckets.bucket_key(buckets.WORKERS_BUCKET, "w1"),
    f"{User(Role.SERVICE).inbox[:-1]}token",
    # records, history and what is said of them in its own namespace
    _record(OURS),
    f"{server_subjects.direct_get(RECORDS)}.{_record(OURS)}",
    subjects.logs(OURS, "train-1", "0", "1", "stdout"),
    subjects.events(OURS, "train-1"),
    subjects.result_part(OURS, "train-1", 0, 1, 0),  # else others would unpickle what a stranger made
    f"$JS.API.STREAM.PURGE.{buckets.results_stream(OURS)}",
    server_subjects.direct_get(buckets.secrets_stream(OURS)),
    f"{server_subjects.direct_get(buckets.secrets_stream(OURS))}.{subjects.secrets(OURS, 'token')}",
    f"$JS.API.STREAM.PURGE.{buckets.secrets_stream(OURS)}",
    subjects.watch_jobs(OURS, "train-1"),
    subjects.watch_endpoints(OURS, "calculator.-.0.0.e1"),
    # JetStream beyond direct reads: consumers can make it send to any subject
    "$JS.API.INFO",
    f"$JS.API.STREAM.INFO.{REGISTRY}",
    f"$JS.API.STREAM.CREATE.{REGISTRY}",
    f"$JS.API.STREAM.UPDATE.{REGISTRY}",
    f"$JS.API.STREAM.DELETE.{REGISTRY}",
    f"$JS.API.STREAM.PURGE.{REGISTRY}",
    f"$JS.API.STREAM.MSG.GET.{RECORDS}",
    server_subjects.message_delete(REGISTRY),
    # backups
    server_subjects.STREAM_NAMES,
    server_subjects.message_get(REGISTRY),
    f"$JS.API.STREAM.SNAPSHOT.{REGISTRY}",
    f"$JS.SNAPSHOT.ACK.{REGISTRY}.token",
    server_subjects.stream_restore(REGISTRY),
    f"$JS.SNAPSHOT.RESTORE.{REGISTRY}.token",
    f"$JS.API.STREAM.PURGE.{buckets.objects_stream(BUNDLES.name, OURS)}",
    f"$JS.API.STREAM.PURGE.{buckets.objects_stream(PAYLOADS.name, OURS)}",
    server_subjects.message_delete(buckets.objects_stream(BUNDLES.name, OURS)),
    f"$JS.API.STREAM.PURGE.{buckets.calls_stream(OURS)}",
    server_subjects.message_delete(buckets.calls_stream(OURS)),
    f"$JS.API.CONSUMER.CREATE.{buckets.calls_stream(OURS)}",
    f"$JS.API.CONSUMER.CREATE.{buckets.objects_stream(BUNDLES.name, OURS)}",
    f"$JS.API.CONSUMER.CREATE.{REGISTRY}",
    f"$JS.API.CONSUMER.CREATE.{REGISTRY}.spy",
    f"$JS.API.CONSUMER.DURABLE.CREATE.{REGISTRY}.spy",
    f"$JS.API.CONSUMER.MSG.NEXT.{buckets.SUBMIT_STREAM}.{buckets.SUBMIT_CONSUMER}",
    f"$JS.ACK.{buckets.SUBMIT_STREAM}.{buckets.SUBMIT_CONSUMER}.1.1.1.1.1",
]

# Nor listen there.
NOT_TO_HEAR = [
    ">",
    "*.>",
    "fluster.>",
    "fluster.*.actors.>",
    "fluster.*.watch.>",
    f"fluster.{OURS}.>",
    subjects.actors_of(THEIRS),
    subjects.actor_any(THEIRS, "calculator"),
    subjects.watch_any(THEIRS),
    subjects.watch_workers(),
    subjects.jobs_submit(OURS),
    subjects.jobs_verb(OURS, "*"),
    subjects.endpoints_verb(OURS, "lookup"),
    subjects.logs_of_job(OURS, "*"),
    subjects.objects_of_all(BUNDLES.name, OURS),
    subjects.objects_of_all(PAYLOADS.name, OURS),
    "fluster.sys.>",
    subjects.worker_verb("w1", "look"),
    "_INBOX.>",
    "_INBOX.*",
    "*.*.*",
    User(Role.SERVICE).inbox,
    User(Role.OPERATOR).inbox,
    User(Role.JOB, THEIRS).inbox,
    User(Role.CLIENT, THEIRS).inbox,
    "$KV.>",
    "$JS.>",
    "$JS.API.>",
    "$JS.SNAPSHOT.>",
    "$JS.EVENT.>",
    "$SYS.>",
]


@pytest.mark.parametrize("role", [Role.JOB, Role.CLIENT])
async def test_what_tenants_may_not_send(connect: Connect, role: Role) -> None:
    peer = await connect(role, OURS)
    for subject in NOT_TO_SEND:
        await peer.client.publish(subject, b"{}")
        (refusal,) = await peer.refusals() or ["allowed"]
        assert f'publish to "{subject.lower()}"' in refusal.lower(), subject


@pytest.mark.parametrize("role", [Role.JOB, Role.CLIENT])
@pytest.mark.parametrize("queue", ["", "controllers"])
async def test_what_tenants_may_not_hear(connect: Connect, role: Role, queue: str) -> None:
    peer = await connect(role, OURS)
    theirs = User(Role.CLIENT if role is Role.JOB else Role.JOB, OURS).inbox
    for subject in (*NOT_TO_HEAR, theirs):
        await peer.client.subscribe(subject, queue)
        (refusal,) = await peer.refusals() or ["allowed"]
        assert f'subscription to "{subject.lower()}"' in refusal.lower(), subject


async def test_a_client_serves_nothing(connect: Connect) -> None:
    client = await connect(Role.CLIENT, OURS)
    for subject in (subjects.actors_of(OURS), server_subjects.service_verb("PING")):
        await client.client.subscribe(subject)
        assert len(await client.refusals()) == 1
    await client.client.publish(_entry(OURS), b"{}")
    assert len(await client.refusals()) == 1


async def test_a_client_sees_who_serves_and_not_what_is_kept(connect: Connect) -> None:
    job, client = await connect(Role.JOB, OURS), await connect(Role.CLIENT, OURS)
    bucket = buckets.actors_bucket(OURS)
    state = buckets.bucket_key(bucket, buckets.state_key("ledger"))
    for subject, seen in ((_seat(OURS), b'"seat"'), (state, b'"state"')):
        assert json.loads((await job.ask(subject, seen)).data)["stream"] == buckets.bucket_stream(bucket)
        assert await _stored(job, bucket, subject) == seen
    assert await _stored(client, bucket, _seat(OURS)) == b'"seat"'
    reads = server_subjects.direct_get(buckets.bucket_stream(bucket))
    calls = server_subjects.direct_get(buckets.calls_stream(OURS))
    for subject in (
        f"{reads}.{state}",
        reads,
        calls,
        f"{calls}.{subjects.durable_calls(OURS, 'x')}",
        state,
        _seat(OURS),
    ):
        await client.client.publish(subject, b"{}")
        assert len(await client.refusals()) == 1, subject
    await client.client.publish(subjects.trim_calls(OURS), b"{}")
    assert len(await client.refusals()) == 1


async def test_what_is_kept_of_actors_and_what_calls_carry_is_not_published_again(connect: Connect) -> None:
    job, client = await connect(Role.JOB, OURS), await connect(Role.CLIENT, OURS)
    seen = await client.listen(subjects.watch_any(OURS))
    bucket = buckets.actors_bucket(OURS)
    for subject in (buckets.bucket_key(bucket, buckets.state_key("secret")), subjects.durable_calls(OURS, "secret")):
        assert "seq" in json.loads((await job.ask(subject, b"secret")).data)
    message = await asyncio.wait_for(seen.get(), TIMEOUT_S)
    assert (message.subject, message.data) == (subjects.watch_calls(OURS, "secret"), b"")
    assert seen.empty()


async def test_services_hear_no_inbox_but_their_own(connect: Connect) -> None:
    service = await connect(Role.SERVICE)
    for subject in (">", "_INBOX.>", User(Role.OPERATOR).inbox, User(Role.JOB, OURS).inbox):
        await service.client.subscribe(subject)
        assert len(await service.refusals()) == 1, subject


async def test_a_gateway_submits_asks_and_watches_for_its_users(
    connect: Connect,
) -> None:
    service, gateway, job = await connect(Role.SERVICE), await connect(Role.GATEWAY), await connect(Role.JOB, OURS)

    async def answer(message: Msg) -> None:
        await message.respond(b"[]")

    await service.client.subscribe(subjects.jobs_verb("*", "explain"), cb=answer)
    assert await service.refusals() == []
    seen = await gateway.listen(subjects.watch_endpoints(OURS))
    assert (await gateway.ask(subjects.jobs_verb(OURS, "explain"))).data == b"[]"
    assert "seq" in json.loads((await gateway.ask(subjects.jobs_submit(OURS), b"{}")).data)
    part = subjects.object_part(BUNDLES.name, OURS, "2" * 64, 0)
    assert "seq" in json.loads((await gateway.ask(part, b"part")).data)
    entry = _entry(OURS, "seen-by-gateway")
    await job.ask(entry, b"{}")
    assert (await asyncio.wait_for(seen.get(), TIMEOUT_S)).data == b"{}"
    assert (await gateway.ask(f"{server_subjects.direct_get(REGISTRY)}.{entry}")).data == b"{}"


# Of what clients may: it answers no requests, calls no actors, and registers nothing.
_NOT_FOR_A_GATEWAY = (
    subjects.actor_any(OURS, "calculator", "add"),
    subjects.actor_one(OURS, "calculator", "e1", "add"),
    subjects.durable_calls(OURS, "ledger"),
    subjects.endpoints_verb(OURS, "register"),
    subjects.endpoints_verb(OURS, "unregister"),
    subjects.trim_calls(OURS),
    f"{User(Role.JOB, OURS).inbox[:-1]}token",
    f"{User(Role.CLIENT, OURS).inbox[:-1]}token",
    "_INBOX.token",
    _entry(OURS),
    _seat(OURS),
    f"{server_subjects.direct_get(buckets.bucket_stream(buckets.actors_bucket(OURS)))}.{_seat(OURS)}",
)


async def test_what_a_gateway_may_not(connect: Connect) -> None:
    gateway = await connect(Role.GATEWAY)
    not_ours = [subject for subject in NOT_TO_SEND if f".{THEIRS}." not in subject and f"_{THEIRS}" not in subject]
    for subject in (*not_ours, *_NOT_FOR_A_GATEWAY):
        await gateway.client.publish(subject, b"{}")
        (refusal,) = await gateway.refusals() or ["allowed"]
        assert f'publish to "{subject.lower()}"' in refusal.lower(), subject
    heard = [subject for subject in NOT_TO_HEAR if subject != subjects.watch_any(THEIRS)]
    for subject in (*heard, subjects.actors_of(OURS), User(Role.CLIENT, OURS).inbox):
        await gateway.client.subscribe(subject)
        (refusal,) = await gateway.refusals() or ["allowed"]
        assert f'subscription to "{subject.lower()}"' in refusal.lower(), subject


async def test_an_autoscaler_sees_the_workers_and_sends_them_away(connect: Connect) -> None:
    scaler, operator = await connect(Role.AUTOSCALER), await connect(Role.OPERATOR)
    row = buckets.bucket_key(buckets.WORKERS_BUCKET, "w1")
    seen = await scaler.listen(subjects.watch_workers())
    await operator.ask(row, b"{}")
    assert (await asyncio.wait_for(seen.get(), TIMEOUT_S)).data == b"{}"
    workers = buckets.bucket_stream(buckets.WORKERS_BUCKET)
    assert (await scaler.ask(f"{server_subjects.direct_get(workers)}.{row}")).data == b"{}"
    for subject in (subjects.worker_verb("w1", "drain"), subjects.vm_trouble(), subjects.workers_list(OURS)):
        await scaler.client.publish(subject, b"{}")
        assert await scaler.refusals() == [], subject


async def test_an_autoscaler_sees_nothing_of_jobs(connect: Connect) -> None:
    scaler = await connect(Role.AUTOSCALER)
    allowed = (subjects.workers_list(THEIRS),)
    reads = (
        subjects.jobs_submit(OURS),
        subjects.jobs_verb(OURS, "list"),
        server_subjects.direct_get(REGISTRY),
        server_subjects.direct_get(buckets.logs_stream(OURS)),
        server_subjects.direct_get(buckets.events_stream(OURS)),
        subjects.secrets(OURS, "token"),
        *(subjects.worker_verb("w1", verb) for verb in subjects.WORKER_VERBS if verb != "drain"),
    )
    for subject in (*(each for each in NOT_TO_SEND if each not in allowed), *reads, *_NOT_FOR_A_GATEWAY):
        await scaler.client.publish(subject, b"{}")
        (refusal,) = await scaler.refusals() or ["allowed"]
        assert f'publish to "{subject.lower()}"' in refusal.lower(), subject
    heard = [subject for subject in NOT_TO_HEAR if subject != subjects.watch_workers()]
    for subject in (*heard, subjects.watch_any(OURS), subjects.heartbeats(), subjects.dispatch_any(OURS)):
        await scaler.client.subscribe(subject)
        (refusal,) = await scaler.refusals() or ["allowed"]
        assert f'subscription to "{subject.lower()}"' in refusal.lower(), subject


# ---- holes that permissions leave -----------------------------------------------------------------------


@pytest.mark.parametrize("rollup", ["all", "sub"])
async def test_a_rollup_does_not_wipe_the_others_from_the_registry(connect: Connect, rollup: str) -> None:
    job, operator = await connect(Role.JOB, OURS), await connect(Role.OPERATOR)
    answer = json.loads((await job.ask(_entry(OURS, "mine"), b"{}", {"Nats-Rollup": rollup})).data)
    assert "rollup not permitted" in answer["error"]["description"]
    assert await _stored(operator, buckets.endpoints_bucket(OURS), _entry(OURS)) == b'"untouched"'


@pytest.mark.parametrize("rollup", ["all", "sub"])
async def test_a_rollup_does_not_wipe_the_stored_files(connect: Connect, rollup: str) -> None:
    job = await connect(Role.JOB, OURS)
    part = subjects.object_part(BUNDLES.name, OURS, "1" * 64, 0)
    answer = json.loads((await job.ask(part, b"", {"Nats-Rollup": rollup})).data)
    assert "rollup not permitted" in answer["error"]["description"]


@pytest.mark.parametrize(
    "target",
    [
        _record(OURS),
        _record(THEIRS),
        _entry(THEIRS),
        subjects.object_part(BUNDLES.name, THEIRS, "0" * 64, 0),
        subjects.result_part(OURS, "train-1", 0, 1, 0),
        f"$JS.API.STREAM.DELETE.{RECORDS}",
    ],
)
@pytest.mark.parametrize(
    "asked",
    [
        subjects.jobs_submit(OURS),
        _entry(OURS, "mine"),
        subjects.durable_calls(OURS, "ledger"),
        _seat(OURS),
        subjects.object_part(BUNDLES.name, OURS, "0" * 64, 0),
        server_subjects.direct_get(REGISTRY),
        f"{server_subjects.direct_get(REGISTRY)}.{_entry(OURS)}",
    ],
)
async def test_no_answer_of_the_server_writes_where_the_asker_may_not(
    connect: Connect, asked: str, target: str
) -> None:
    job, operator = await connect(Role.JOB, OURS), await connect(Role.OPERATOR)
    seen = await operator.listen(target)
    await job.client.publish(asked, b'{"seq": 1}', reply=target)
    assert await job.refusals() == []
    # The answer itself does arrive, at all subscribers: it is the streams that it must not reach.
    await asyncio.wait_for(seen.get(), TIMEOUT_S)
    for namespace in (OURS, THEIRS):
        assert await _stored(operator, buckets.jobs_bucket(namespace), _record(namespace)) == b'"untouched"'
        assert await _stored(operator, buckets.endpoints_bucket(namespace), _entry(namespace)) == b'"untouched"'


# ---- what is allowed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "namespace"), [(Role.JOB, OURS), (Role.CLIENT, OURS), (Role.OPERATOR, None), (Role.SERVICE, None)]
)
async def test_an_actor_of_a_job_is_called(connect: Connect, role: Role, namespace: str | None) -> None:
    actor, caller = await connect(Role.JOB, OURS), await connect(role, namespace)
    subject = subjects.actor_any(OURS, f"echo-{role}", "say")

    async def answer(message: Msg) -> None:
        await message.respond(b"said " + message.data)

    await actor.client.subscribe(subject, "pool", cb=answer)
    assert await actor.refusals() == []
    if role is Role.SERVICE:  # which only asks what cannot answer to it
        await caller.client.publish(subject, b"hi")
        assert await caller.refusals() == []
    else:
        assert (await caller.ask(subject, b"hi")).data == b"said hi"
        assert await actor.refusals() == []


async def test_the_plain_command_with_the_operators_url_calls_and_watches(
    server: GuardedServer, connect: Connect
) -> None:
    actor = await connect(Role.JOB, OURS)
    subject = subjects.actor_any(OURS, "plain", "say")

    async def answer(message: Msg) -> None:
        await message.respond(b"said")

    await actor.client.subscribe(subject, cb=answer)
    assert await actor.refusals() == []
    operator = server.credentials(Role.OPERATOR)
    client = await nats.connect(operator.to_url(), **(plain_options(operator) if operator.token else {}))
    try:
        assert (await client.request(subject, b"", TIMEOUT_S)).data == b"said"
        bucket = await client.jetstream().key_value(buckets.endpoints_bucket(OURS))
        watcher = await bucket.watchall()
        await actor.ask(_entry(OURS, "last"), b"{}")
        keys: list[str] = []
        while "last.-.0.0.e1" not in keys:
            entry = await watcher.updates(TIMEOUT_S)
            keys += [entry.key] if entry is not None else []  # None where nats-py believes that all is read
        assert "calculator.-.0.0.e1" in keys
        assert len(keys) == len(set(keys))
    finally:
        await client.close()


async def test_a_job_keeps_its_registry_and_watches_it(connect: Connect) -> None:
    job, client = await connect(Role.JOB, OURS), await connect(Role.CLIENT, OURS)
    seen = await client.listen(subjects.watch_endpoints(OURS))
    subject = _entry(OURS, "watched")
    assert json.loads((await job.ask(subject, b"one")).data)["stream"] == REGISTRY
    for peer in (job, client):
        assert (await peer.ask(f"{server_subjects.direct_get(REGISTRY)}.{subject}")).data == b"one"
    assert (await asyncio.wait_for(seen.get(), TIMEOUT_S)).data == b"one"


@pytest.mark.parametrize("role", [Role.JOB, Role.CLIENT])
async def test_a_submit_is_acknowledged_and_delivered(connect: Connect, role: Role) -> None:
    peer, service = await connect(role, OURS), await connect(Role.SERVICE)
    sequence = json.loads((await peer.ask(subjects.jobs_submit(OURS), b"{}")).data)["seq"]
    consumer = await service.client.jetstream().pull_subscribe(
        subjects.jobs_submit("*"), durable=buckets.SUBMIT_CONSUMER, stream=buckets.SUBMIT_STREAM
    )
    delivered = 0
    while delivered < sequence:
        for message in await consumer.fetch(10, TIMEOUT_S):
            await message.ack_sync(TIMEOUT_S)
            delivered = message.metadata.sequence.stream
    info = await service.client.jetstream().consumer_info(buckets.SUBMIT_STREAM, buckets.SUBMIT_CONSUMER)
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_a_service_answers_a_tenant(connect: Connect) -> None:
    service, job = await connect(Role.SERVICE), await connect(Role.JOB, OURS)

    async def answer(message: Msg) -> None:
        await message.respond(b"[]")

    await service.client.subscribe(subjects.jobs_verb("*", "list"), cb=answer)
    assert await service.refusals() == []
    assert (await job.ask(subjects.jobs_verb(OURS, "list"))).data == b"[]"


async def test_tenants_read_logs_and_events_without_a_consumer(connect: Connect) -> None:
    service, job, client = await connect(Role.SERVICE), await connect(Role.JOB, OURS), await connect(Role.CLIENT, OURS)
    subject = subjects.logs(OURS, "train-1", "0", "1", "stdout")
    live = await client.listen(subjects.watch_logs(OURS))
    for line in (b"one", b"two"):
        assert "seq" in json.loads((await service.ask(subject, line)).data)
    assert "seq" in json.loads((await service.ask(subjects.events(OURS, "train-1"), b"{}")).data)
    assert [(await asyncio.wait_for(live.get(), TIMEOUT_S)).data for _ in range(2)] == [b"one", b"two"]
    for peer in (job, client):
        inbox = peer.client.new_inbox()
        batch = await peer.listen(inbox)
        request = json.dumps({"seq": 1, "batch": 10, "next_by_subj": subject}).encode()
        await peer.client.publish(server_subjects.direct_get(buckets.logs_stream(OURS)), request, reply=inbox)
        assert [(await asyncio.wait_for(batch.get(), TIMEOUT_S)).data for _ in range(3)] == [b"one", b"two", b""]
        last = await peer.ask(
            f"{server_subjects.direct_get(buckets.events_stream(OURS))}.{subjects.events(OURS, 'train-1')}"
        )
        assert last.data == b"{}"


async def test_an_actor_is_a_micro_service(connect: Connect) -> None:
    job, operator = await connect(Role.JOB, OURS), await connect(Role.OPERATOR)
    asked = await job.listen(server_subjects.service_verb("PING"))
    await job.listen(server_subjects.service_verb("INFO", "calculator"))
    answer = asyncio.create_task(operator.ask(server_subjects.service_verb("PING")))
    message = await asyncio.wait_for(asked.get(), TIMEOUT_S)
    await message.respond(b"pong")
    assert (await answer).data == b"pong"


async def test_what_nobody_stores_is_said_at_once(connect: Connect) -> None:
    operator = await connect(Role.OPERATOR)
    for subject in (
        buckets.bucket_key("none", "key"),
        server_subjects.direct_get("none"),
        f"{server_subjects.direct_get('none')}.k",
    ):
        with pytest.raises(nats.errors.NoRespondersError):
            await operator.ask(subject)


async def test_a_signed_worker_writes_of_itself_and_of_the_tasks_of_its_namespaces(tmp_path: Path) -> None:
    def task(namespace: str) -> str:
        return buckets.bucket_key(buckets.jobs_bucket(namespace), buckets.task_key("train-1", 0))

    def row(worker: str) -> str:
        return buckets.bucket_key(buckets.WORKERS_BUCKET, worker)

    with guarded_server("tokens", (OURS, THEIRS), tmp_path) as server:
        worker = await _connect(server.credentials(Role.WORKER, serves=(OURS,)))
        try:
            for subject in (row(WORKER), subjects.heartbeats(WORKER), task(OURS), subjects.logs(OURS, "train-1", "0")):
                await worker.client.publish(subject, b"{}")
                assert await worker.refusals() == [], subject
            for subject in (row("w2"), subjects.heartbeats("w2"), task(THEIRS), _record(OURS), _entry(THEIRS)):
                await worker.client.publish(subject, b"{}")
                assert len(await worker.refusals()) == 1, subject
            for subject in (subjects.worker_verb("w2", "*"), subjects.watch_any(THEIRS), subjects.actors_of(OURS)):
                await worker.client.subscribe(subject)
                assert len(await worker.refusals()) == 1, subject
        finally:
            await worker.client.close()


async def test_workers_with_passwords_write_for_each_other_and_for_the_tasks_of_all(tmp_path: Path) -> None:
    """They share one user, which the server takes for any of them."""
    tasks = [
        buckets.bucket_key(buckets.jobs_bucket(namespace), buckets.task_key("train-1", 0))
        for namespace in (OURS, THEIRS)
    ]
    rows = [buckets.bucket_key(buckets.WORKERS_BUCKET, worker) for worker in (WORKER, "w2")]
    with guarded_server("passwords", (OURS, THEIRS), tmp_path) as server:
        worker = await _connect(server.credentials(Role.WORKER))
        try:
            for subject in (*rows, subjects.heartbeats(WORKER), subjects.heartbeats("w2"), *tasks):
                await worker.client.publish(subject, b"{}")
                assert await worker.refusals() == [], subject
        finally:
            await worker.client.close()
