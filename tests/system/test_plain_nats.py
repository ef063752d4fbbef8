"""A program that knows NATS alone can use the cluster: a plain client, JSON, and nothing of Fluster."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.kv import KeyValue

from fluster.cluster import LocalCluster
from fluster_bus.core.version import VERSION
from fluster_bus.messages.parts.resources import MIB

pytestmark = pytest.mark.anyio

PATIENCE_S = 60
FINAL = {"SUCCEEDED", "FAILED", "KILLED", "WORKER_FAILED", "UNSCHEDULABLE"}


@pytest.fixture(params=["_INBOX", "_INBOX.default.operator"])
async def client(cluster: LocalCluster, request: pytest.FixtureRequest) -> AsyncIterator[Client]:
    """As the address says; the inbox prefix is what the client has by itself, or the operator's own."""
    url = urlsplit(cluster.address)
    connected = await nats.connect(
        f"nats://{url.hostname}:{url.port}", user=url.username, password=url.password, inbox_prefix=request.param
    )
    yield connected
    await connected.close()


async def ask(client: Client, subject: str, body: Any = None) -> Any:
    reply = await client.request(subject, b"" if body is None else json.dumps(body).encode(), timeout=60)
    assert not reply.headers, reply.headers
    return json.loads(reply.data)


async def error_of(client: Client, subject: str, body: bytes) -> tuple[str, str]:
    """Code and text of an error reply."""
    reply = await client.request(subject, body, timeout=60)
    assert reply.headers is not None, reply.data
    told = json.loads(reply.data)["error"]
    assert told["type"] == reply.headers["Nats-Service-Error-Code"]
    return told["type"], told["message"]


async def submit(client: Client, **request: Any) -> int:
    """The place in the stream."""
    ack = await client.jetstream().publish("fluster.default.jobs.submit", json.dumps(request).encode())
    assert ack.stream == "FLUSTER_SUBMIT"
    return ack.seq


async def watch(client: Client, key: str) -> KeyValue.KeyWatcher:
    """What is written of a record from now on, after the last that was."""
    bucket = await client.jetstream().key_value("fluster_jobs_default")
    return await bucket.watch(key)


async def states_in(watcher: KeyValue.KeyWatcher) -> list[str]:
    """The states that a record goes through, as they are written."""
    found: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not found or found[-1] not in FINAL:
                entry: KeyValue.Entry | None = await watcher.updates(timeout=PATIENCE_S)
                if entry is not None and entry.value is not None:
                    state = json.loads(entry.value).get("state", "PENDING")
                    found += [state] if state not in found else []
    finally:
        await watcher.stop()
    return found


async def states(client: Client, key: str) -> list[str]:
    """The same, of one that is written already, from its last state on."""
    return await states_in(await watch(client, key))


async def stored(client: Client, subject: str, count: int) -> list[Msg]:
    """The first messages that the streams have of a subject, waited for: events are written a moment after records."""
    subscription = await client.jetstream().subscribe(subject, ordered_consumer=True)
    try:
        return [await subscription.next_msg(timeout=PATIENCE_S) for _ in range(count)]
    finally:
        await subscription.unsubscribe()


async def test_a_job_is_submitted_and_watched_to_its_end(client: Client) -> None:
    name = f"plain-{client.client_id}"
    watcher = await watch(client, name)
    await submit(client, name="plain", job_id=name, entrypoint={"command": ["sh", "-c", "echo hello; echo oops >&2"]})
    assert await states_in(watcher) == ["PENDING", "SUCCEEDED"]
    assert await states(client, f"{name}.0") == ["SUCCEEDED"]

    (job,) = (await ask(client, "fluster.default.jobs.status", {"job_ids": [name]}))["jobs"]
    assert (job["job_id"], job["name"], job["status"], job["tasks"][0]["exit_code"]) == (name, "plain", "SUCCEEDED", 0)
    listed = await ask(client, "fluster.default.jobs.list", {"limit": 5})
    assert name in {each["job_id"] for each in listed["jobs"]}

    logs = {
        msg.subject.split(".")[-1]: json.loads(msg.data)
        for msg in await stored(client, f"fluster.default.logs.{name}.>", 2)
    }
    assert [text for _, text in logs["stdout"]["lines"]] == ["hello"]
    assert [text for _, text in logs["stderr"]["lines"]] == ["oops"]

    events = [json.loads(msg.data) for msg in await stored(client, f"fluster.default.events.{name}", 6)]
    assert [event["transition"]["state"] for event in events if "task" in event] == [
        "PENDING",
        "BUILDING",
        "RUNNING",
        "SUCCEEDED",
    ]
    assert [event["transition"]["state"] for event in events if "task" not in event] == ["PENDING", "SUCCEEDED"]


async def test_a_job_without_an_id_is_given_one(client: Client) -> None:
    sequence = await submit(client, name="nameless", entrypoint={"command": ["true"]})
    assert (await states(client, f"nameless-{sequence}"))[-1] == "SUCCEEDED"


async def test_a_job_is_stopped(client: Client) -> None:
    name = f"stopped-{client.client_id}"
    place = await submit(client, name="stopped", job_id=name, entrypoint={"command": ["sleep", "600"]})
    reply = await ask(client, "fluster.default.jobs.status", {"job_ids": [name], "submissions": [place]})
    assert reply.get("unknown", []) == []
    stopped = await ask(client, "fluster.default.jobs.terminate", {"job_id": name, "reason": "by hand"})
    assert stopped["job"]["job_id"] == name
    assert (await states(client, name))[-1] == "KILLED"
    (job,) = (await ask(client, "fluster.default.jobs.status", {"job_ids": [name]}))["jobs"]
    assert job["error_message"] == "by hand"


async def test_endpoints_are_registered_looked_up_and_taken_away(client: Client) -> None:
    endpoint = {
        "endpoint_id": "e1",
        "name": "by-hand",
        "address": "http://localhost:1",
        "namespace": "default",
        "metadata": {"a": "b"},
        "lease_s": 60,
    }
    assert await ask(client, "fluster.default.endpoints.register", endpoint) == endpoint
    assert (await ask(client, "fluster.default.endpoints.lookup", {"name": "by-hand"}))["endpoints"] == [endpoint]
    assert endpoint in (await ask(client, "fluster.default.endpoints.list", {"prefix": "by-"}))["endpoints"]
    assert await ask(client, "fluster.default.endpoints.lookup", {"name": "by"}) == {}
    assert await ask(client, "fluster.default.endpoints.unregister", {"endpoint_id": "e1"}) == {}
    assert await ask(client, "fluster.default.endpoints.lookup", {"name": "by-hand"}) == {}


async def test_the_rest_is_asked(client: Client) -> None:
    assert await ask(client, "fluster.default.ensure") == {
        "wire": {"newest": 1, "oldest": 1},
        "version": VERSION,
        "endpoint_lease_s": 10.0,
        "seat_lease_s": 10.0,
        "object_bytes": {"bundles": 512 * MIB, "payloads": 512 * MIB, "requests": 8 * MIB},
    }
    workers = (await ask(client, "fluster.default.workers.list"))["workers"]
    assert [worker["info"]["worker_id"] for worker in workers] == ["worker-0", "worker-1"]


async def test_services_are_listed(client: Client) -> None:
    inbox = client.new_inbox()
    found = await client.subscribe(inbox)
    await client.publish("$SRV.PING", reply=inbox)
    names = {json.loads((await found.next_msg(timeout=60)).data)["name"] for _ in range(3)}
    assert names == {"fluster-controller", "fluster-worker"}
    await found.unsubscribe()
    info = await ask(client, "$SRV.INFO.fluster-controller")
    assert info["type"] == "io.nats.micro.v1.info_response"
    served = {endpoint["subject"] for endpoint in info["endpoints"]}
    assert served >= {"fluster.*.jobs.status", "fluster.*.jobs.list", "fluster.*.jobs.terminate"}
    assert served >= {f"fluster.*.endpoints.{verb}" for verb in ("register", "unregister", "lookup", "list")}
    stats = await ask(client, "$SRV.STATS.fluster-controller")
    assert stats["type"] == "io.nats.micro.v1.stats_response"


@pytest.mark.parametrize(
    ("subject", "body", "code", "message"),
    [
        ("jobs.status", b"{", "InvalidMessageError", "no valid StatusRequest"),
        ("jobs.status", b"[1]", "InvalidMessageError", "no valid StatusRequest"),
        ("jobs.status", b"\x80\x05N.", "InvalidMessageError", "no valid StatusRequest"),
        ("jobs.status", b'{"job_ids": 7}', "InvalidMessageError", "job_ids"),
        ("jobs.list", b'{"limit": 0}', "InvalidMessageError", "limit"),
        ("jobs.list", b'{"states": ["SLEEPING"]}', "InvalidMessageError", "states"),
        ("jobs.terminate", b"", "InvalidMessageError", "job_id"),
        ("jobs.terminate", b'{"job_id": "nobody"}', "JobNotFoundError", "no job 'nobody'"),
        ("endpoints.register", b'{"name": "a.b"}', "InvalidMessageError", "invalid endpoint name 'a.b'"),
        ("endpoints.unregister", b"{}", "InvalidMessageError", "endpoint_id"),
    ],
)
async def test_a_malformed_body_is_answered_with_an_error(
    client: Client, subject: str, body: bytes, code: str, message: str
) -> None:
    told = await error_of(client, f"fluster.default.{subject}", body)
    assert told[0] == code
    assert message in told[1]


async def test_a_namespace_that_is_not_there_is_said(client: Client) -> None:
    for subject in ("fluster.elsewhere.jobs.list", "fluster.elsewhere.ensure", "fluster.elsewhere.endpoints.list"):
        assert await error_of(client, subject, b"{}") == (
            "NamespaceNotFound",
            "the cluster has no namespace 'elsewhere': an operator adds it with `fluster namespace add elsewhere`",
        )


@pytest.mark.parametrize(
    ("subject", "body", "reason"),
    [
        ("default", b"not json", "no valid JobRequest"),
        ("default", b"\x80\x05N.", "no valid JobRequest"),
        ("default", b"", "name: Field required"),
        ("default", b'{"name": "a b", "entrypoint": {"command": ["true"]}}', "invalid job name 'a b'"),
        ("default", b'{"name": "x", "entrypoint": {"callable": "x", "args": 5}}', "cannot be called"),
        ("default", b'{"name": "x", "entrypoint": {"pickled": "%%%"}}', "pickled"),
        ("default", b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"cpu": 1e999}}', "cpu"),
        ("default", b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"memory": 1e999}}', "memory"),
        ("default", b'{"name": "x", "entrypoint": {"command": ["a"]}, "replicas": 1000000}', "replicas"),
        ("default", b"[" * 30_000, "no valid JobRequest"),
        ("elsewhere", b'{"name": "x", "entrypoint": {"command": ["true"]}}', None),
        ("sys", b'{"name": "x", "entrypoint": {"command": ["true"]}}', None),
        ("\xe9\xe8", b'{"name": "x", "entrypoint": {"command": ["true"]}}', None),
    ],
)
async def test_a_submit_that_cannot_be_recorded_is_refused_and_stops_nobody(
    client: Client, subject: str, body: bytes, reason: str | None
) -> None:
    refused = await client.subscribe("fluster.default.watch.events.>")
    terminated = await client.subscribe("$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.FLUSTER_SUBMIT.>")
    await client.flush()
    ack = await client.jetstream().publish(f"fluster.{subject}.jobs.submit", body)
    advisory = json.loads((await terminated.next_msg(timeout=60)).data)
    assert advisory["stream_seq"] == ack.seq
    while reason is not None:
        told = json.loads((await refused.next_msg(timeout=60)).data)["transition"]
        # That of a job or task may have the same number.
        if told["number"] == ack.seq and told["reason"].startswith("refused: "):
            assert reason in told["reason"]
            break
    name = f"after-{ack.seq}"
    await submit(client, name="after", job_id=name, entrypoint={"command": ["true"]})
    assert (await states(client, name))[-1] == "SUCCEEDED"


async def test_a_reply_that_is_no_inbox_is_not_written(client: Client) -> None:
    """Otherwise a client that may ask could have the controller write wherever it may itself."""
    overheard = await client.subscribe("fluster.sys.workers.worker-0.look")
    await client.publish("fluster.default.jobs.list", b"{}", reply="fluster.sys.workers.worker-0.look")
    await client.publish("$SRV.PING", reply="fluster.sys.workers.worker-0.look")
    await ask(client, "fluster.default.jobs.list")
    assert overheard.pending_msgs == 0
