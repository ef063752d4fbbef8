"""docs/debugging-with-nats.md, command by command, through a plain nats-py client with the default inbox prefix."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from fluster import ActorPool, JobId, JobStatus, LocalCluster, actor, deploy

GUIDE = Path(__file__).parents[2] / "docs" / "debugging-with-nats.md"
TIMEOUT_S = 60


@actor
class Counter:
    """The actor of the README."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def commands() -> list[list[str]]:
    """The `nats …` lines of the guide's shell blocks, taken apart as a shell would."""
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("nats ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster() as cluster:
        deploy(cluster, Counter, 100, name="counter", replicas=2)
        yield cluster


@pytest.fixture
async def plain(cluster: LocalCluster) -> AsyncIterator[Client]:
    client = await nats.connect(cluster.address)
    yield client
    await client.close()


async def answer(client: Client, subject: str, body: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    reply = await client.request(subject, body, timeout=TIMEOUT_S)
    return json.loads(reply.data), dict(reply.headers or {})


async def wait_job(cluster: LocalCluster, job_id: str) -> JobStatus:
    info = await asyncio.to_thread(lambda: cluster.wait(JobId(job_id), timeout=TIMEOUT_S))
    return JobStatus(info.status)


Check = Callable[[Client, LocalCluster, list[str]], Awaitable[None]]


async def check_request(client: Client, cluster: LocalCluster, words: list[str]) -> None:
    every = "--replies=0" in words
    subject, *rest = [word for word in words[1:] if not word.startswith("--")]
    body = rest[0].encode() if rest else b""
    if every:
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish(subject, body, reply=inbox)
        results = [json.loads((await replies.next_msg(timeout=TIMEOUT_S)).data) for _ in range(2)]
        assert all(isinstance(result["result"], int) for result in results)
        return
    reply, headers = await answer(client, subject, body)
    if subject.endswith("jobs.submit"):
        assert reply["stream"] == "FLUSTER_SUBMIT"
        # Answered once the controller has looked at it, which may be a moment after the stream has it.
        await answer(client, "fluster.default.jobs.status", json.dumps({"submissions": [reply["seq"]]}).encode())
        assert await wait_job(cluster, json.loads(body)["job_id"]) is JobStatus.SUCCEEDED
    elif subject.endswith("jobs.status"):
        assert reply["jobs"][0]["status"] == "SUCCEEDED"
    elif subject.endswith("jobs.list"):
        assert "hello-1" in {job["job_id"] for job in reply["jobs"]}
    elif subject.endswith("jobs.explain"):
        assert reply["reason"] == "it ended as SUCCEEDED"
    elif subject.endswith("jobs.terminate"):
        assert reply["job"]["job_id"] == "hello-1"
    elif subject.endswith(("endpoints.lookup", "endpoints.list")):
        assert {endpoint["name"] for endpoint in reply["endpoints"]} == {"counter"}
    elif subject.endswith("endpoints.register"):
        assert reply["name"] == "database"
        assert cluster.lookup_endpoints("database")[0].address == "10.0.0.5:5432"
    elif subject.endswith("endpoints.unregister"):
        assert cluster.lookup_endpoints("database") == []
    elif subject.endswith("workers.list"):
        assert reply["workers"][0]["info"]["worker_id"] == "worker-0"
    elif subject.endswith("any.add") and b"five" in body:
        assert reply["error"]["type"] == "fluster.errors.InvalidArgumentsError"
        assert "Nats-Service-Error" in headers
    elif subject.endswith("any.add"):
        assert reply["result"] > 100
    elif subject.endswith("any.no_such_method"):
        assert reply["error"]["type"] == "AttributeError"
        assert headers["Nats-Service-Error-Code"]
    else:
        pytest.fail(f"the guide has a request that nothing here checks: {words}")


async def check_sub(client: Client, cluster: LocalCluster, words: list[str]) -> None:
    """Something arrives there when a job goes by."""
    heard: asyncio.Queue[Msg] = asyncio.Queue()

    async def on_message(message: Msg) -> None:
        heard.put_nowait(message)

    await client.subscribe(words[1], cb=on_message)
    await client.flush()
    await client.flush()
    if "hello-1" in words[1]:
        return  # that job is over: what is heard there is heard on the wildcard of the same kind
    body = b'{"name": "heard", "entrypoint": {"command": ["echo", "heard"]}}'
    await client.request("fluster.default.jobs.submit", body, timeout=TIMEOUT_S)
    message = await asyncio.wait_for(heard.get(), TIMEOUT_S)
    assert message.subject.startswith(words[1].split("*")[0].rstrip(">"))


async def check_kv(client: Client, cluster: LocalCluster, words: list[str]) -> None:
    verb, bucket, *key = words[1:]
    store = await client.jetstream().key_value(bucket)
    if verb == "get":
        entry = await store.get(key[0])
        assert entry.value is not None
        assert json.loads(entry.value)
        return
    assert verb == "watch"
    watcher = await store.watch(*(key or [">"]))
    first = await watcher.updates(timeout=TIMEOUT_S)
    while first is None:
        first = await watcher.updates(timeout=TIMEOUT_S)
    assert first.value
    await watcher.stop()


async def check_stream(client: Client, cluster: LocalCluster, words: list[str]) -> None:
    assert words[1] == "view"
    subscription = await client.jetstream().subscribe(">", stream=words[2], ordered_consumer=True)
    stored = json.loads((await subscription.next_msg(timeout=TIMEOUT_S)).data)
    assert "lines" in stored or "transition" in stored
    await subscription.unsubscribe()


async def check_micro(client: Client, cluster: LocalCluster, words: list[str]) -> None:
    verb = {"ls": "PING", "info": "INFO", "stats": "STATS"}[words[1]]
    inbox = client.new_inbox()
    replies = await client.subscribe(inbox)
    await client.publish(".".join(["$SRV", verb, *words[2:]]), b"", reply=inbox)
    wanted = set(words[2:]) or {"fluster-controller", "fluster-worker", "counter"}
    seen: set[str] = set()
    while not wanted <= seen:
        seen.add(json.loads((await replies.next_msg(timeout=TIMEOUT_S)).data)["name"])


CHECKS: dict[str, Check] = {
    "req": check_request,
    "sub": check_sub,
    "kv": check_kv,
    "stream": check_stream,
    "micro": check_micro,
}


@pytest.mark.anyio
async def test_every_command_of_the_guide_does_what_it_says(cluster: LocalCluster, plain: Client) -> None:
    found = commands()
    assert len(found) > 25
    # Submit first, so that whatever looks at `hello-1` finds it.
    for words in sorted(found, key=lambda words: "jobs.submit" not in " ".join(words)):
        try:
            await CHECKS[words[0]](plain, cluster, words)
        except Exception as error:
            error.add_note(f"at: nats {shlex.join(words)}")
            raise


def test_the_pool_of_the_guide_is_called_the_usual_way_too(cluster: LocalCluster) -> None:
    assert ActorPool(cluster, "counter").call().add(0) >= 100
