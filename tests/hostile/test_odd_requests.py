"""Whatever a tenant sends as a request, or writes as the record of an actor, ends that request or concerns that record alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import ServiceError
from fluster_bus.core.roles import Role
from fluster_bus.messages import (
    Endpoint,
    EndpointQuery,
    ExplainRequest,
    FlushRequest,
    JobId,
    ListRequest,
    Message,
    NamespaceRequest,
    OwnerReply,
    OwnerRequest,
    StatusReply,
    StatusRequest,
    TerminateRequest,
    TrimCalls,
    UnregisterRequest,
)
from fluster_bus.messages.nodes import WorkerQuery
from fluster_bus.messages.stacks import TaskStackRequest
from fluster_bus.messages.workers import JoinRequest
from fluster_bus.server import EmbeddedServer
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.join_register import JoinRegister
from fluster_bus.trust.join_tokens import JoinedFolder, join
from fluster_bus.trust.signer import read_signing_keys, write_signing_keys
from fluster_services.config import LOCAL_TIMING
from fluster_services.controller.controller import Controller, ControllerConfig
from tests.component.conftest import ConnectBus
from tests.component.controllers import NS, RunningController
from tests.hostile.test_messages import TEXTS, VALUES

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0
AT_ONCE = 16


def odd_requests(kind: type[Message], **typical: st.SearchStrategy[object]) -> list[bytes]:
    """Bodies for requests of that kind: each field by itself or not there, of its own type or of any other."""
    fields = {name: typical.get(name, VALUES) | VALUES for name in kind.model_fields}
    found = [b"", b"null", b"[]", b"{", b"\xff", b"[" * 50_000, b'{"newer": ' + b"[" * 500 + b"]" * 500 + b"}"]

    @settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.fixed_dictionaries({}, optional=fields))
    def collect(body: dict[str, object]) -> None:
        found.append(json.dumps(body).encode())

    collect()
    return found


async def codes_of_answers(bus: Bus, subject: str, bodies: list[bytes]) -> set[str]:
    """Those of the errors that the requests are answered with. Each is answered."""
    room, codes = asyncio.Semaphore(AT_ONCE), set[str]()

    async def ask(body: bytes) -> None:
        async with room:
            try:
                await bus.request(subject, body, timeout_s=PATIENCE_S)
            except ServiceError as error:
                codes.add(error.code)

    async with asyncio.TaskGroup() as asking:
        for body in bodies:
            asking.create_task(ask(body))
    return codes


NAMES = st.sampled_from(["program", "a.b", "*", ">", "..", "\0", "caf\xe9", "x" * 300, *TEXTS])
NUMBER = st.integers(-2, 2) | st.sampled_from([1 << 31, 1 << 63, 1 << 64, 10**300])
NUMBERS = st.lists(NUMBER, max_size=4)


REFUSALS = {
    "InvalidMessageError",
    "InvalidNameError",
    "JobNotFoundError",
    "MessageTooLargeError",
    "StorageError",  # no stream has a place of that number
    "WrongNamespace",
}
Verb = tuple[str, type[Message], dict[str, st.SearchStrategy[object]]]
VERBS: list[Verb] = [
    (subjects.jobs_verb(NS, "own"), OwnerRequest, {"owner": NAMES, "ended": st.booleans()}),
    (
        subjects.jobs_verb(NS, "status"),
        StatusRequest,
        {"job_ids": st.lists(NAMES, max_size=4), "submissions": NUMBERS, "details": st.booleans()},
    ),
    (subjects.jobs_verb(NS, "list"), ListRequest, {"limit": NUMBER, "skip": NUMBER, "after": NUMBER}),
    (subjects.jobs_verb(NS, "terminate"), TerminateRequest, {"job_id": NAMES, "reason": NAMES}),
    (subjects.jobs_verb(NS, "explain"), ExplainRequest, {"job_id": NAMES}),
    (subjects.jobs_verb(NS, "stack"), TaskStackRequest, {"job_id": NAMES, "task": NUMBER}),
    (subjects.jobs_verb(NS, "flush"), FlushRequest, {"job_id": NAMES}),
    (subjects.ensure_namespace(NS), NamespaceRequest, {}),
    (subjects.workers_list(NS), WorkerQuery, {"nodes": st.booleans(), "after": NAMES, "limit": NUMBER}),
    (subjects.trim_calls(NS), TrimCalls, {"name": NAMES, "before": NUMBER}),
    (
        subjects.endpoints_verb(NS, "register"),
        Endpoint,
        {
            "endpoint_id": NAMES,
            "name": NAMES,
            "address": NAMES,
            "namespace": st.just(NS),
            "job_id": NAMES,
            "task": NUMBER,
            "attempt": NUMBER,
            "lease_s": NUMBER,
            "metadata": st.dictionaries(NAMES, NAMES, max_size=2),
        },
    ),
    (subjects.endpoints_verb(NS, "unregister"), UnregisterRequest, {"endpoint_id": NAMES}),
    (subjects.endpoints_verb(NS, "lookup"), EndpointQuery, {"name": NAMES, "prefix": NAMES}),
    (subjects.endpoints_verb(NS, "list"), EndpointQuery, {"name": NAMES, "prefix": NAMES}),
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
async def test_any_question_is_answered_or_refused(
    controller: RunningController,
    own_server: EmbeddedServer,
    connect_bus: ConnectBus,
    verb: Verb,
) -> None:
    subject, kind, typical = verb
    bus = await connect_bus(own_server, Role.JOB, NS)
    bodies = odd_requests(kind, **typical)
    bodies.append(json.dumps({"job_ids": ["\0" * 17_000] * 10}).encode())  # six times as large as an answer
    assert await codes_of_answers(bus, subject, bodies) <= REFUSALS
    owned = await bus.ask(subjects.jobs_verb(NS, "own"), OwnerRequest(owner="program"), OwnerReply)
    assert owned.unfinished == 0
    answer = await bus.ask(subjects.jobs_verb(NS, "status"), StatusRequest(job_ids=(JobId("none"),)), StatusReply)
    assert answer.unknown == ("none",)


def test_each_verb_about_jobs_and_endpoints_is_asked_odd_questions() -> None:
    asked = {subject for subject, _, _ in VERBS}
    assert asked >= {subjects.jobs_verb(NS, verb) for verb in subjects.JOB_VERBS}
    assert asked >= {subjects.endpoints_verb(NS, verb) for verb in subjects.ENDPOINT_VERBS}


@pytest.fixture
async def register(tmp_path: Path) -> AsyncIterator[JoinRegister]:
    """That of a cluster with a controller that signs."""
    authority = Authority.of_cluster(tmp_path / "authority")
    with EmbeddedServer(authority=authority) as server:
        url = f"nats://127.0.0.1:{server.port}"
        made = authority.issue(Role.SERVICE, "controllers")
        address = BusAddress(url, token=made.token, seed=made.seed)
        write_signing_keys(authority, tmp_path / "keys.json")
        signers = read_signing_keys(tmp_path / "keys.json")
        bus = await Bus.connect(address, name="controller")
        controller = Controller(bus, ControllerConfig(address=address, timing=LOCAL_TIMING, signers=signers))
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(controller.run(ready.set))
            await ready.wait()
            yield JoinRegister(authority, url)
            running.cancel()
        await bus.close()


async def test_who_asks_to_join_with_anything_is_refused_and_the_token_is_as_good_as_before(
    register: JoinRegister, tmp_path: Path
) -> None:
    token = await register.create(["default"], uses=1, lifetime_s=600)
    bus = await Bus.connect(token.address, name="attacker")
    keys = st.dictionaries(st.sampled_from(["default", *TEXTS]), NAMES, max_size=3)
    bodies = odd_requests(JoinRequest, worker_id=NAMES, key=NAMES, job_keys=keys)
    try:
        codes = await codes_of_answers(bus, subjects.join(token.token_id), bodies)
    finally:
        await bus.close()
    assert codes <= {"InvalidMessageError", "InvalidNameError", "JoinRefused", "MessageTooLargeError"}
    await join(token, "w1", JoinedFolder(tmp_path / "w1"))
    (listed,) = await register.tokens()
    assert list(listed.used_by.values()) == ["w1"]
