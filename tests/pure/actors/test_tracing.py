"""Traces go through calls and into jobs where a program traces, and cost nothing where it does not."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

from fluster import tracing
from fluster.actors import ActorContext, ActorPool, actor
from fluster.cluster.jobs.submissions import traced
from fluster.errors import ActorNotFoundError, ActorTimeoutError
from fluster.testing import LocalActors
from fluster_bus.messages import Entrypoint, EnvironmentConfig, JobRequest

TIMEOUT_S = 60.0


class Ended(SpanProcessor):
    """The spans that have ended, by name."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self._several = threading.Condition()

    def on_end(self, span: ReadableSpan) -> None:
        with self._several:
            self.spans.append(span)
            self._several.notify_all()

    def all(self, name: str, kind: SpanKind, count: int = 1) -> list[ReadableSpan]:
        def found() -> list[ReadableSpan]:
            return [each for each in self.spans if each.name == name and each.kind is kind]

        with self._several:
            assert self._several.wait_for(lambda: len(found()) >= count, TIMEOUT_S), self.spans
            assert len(found()) == count
            return found()

    def one(self, name: str, kind: SpanKind) -> ReadableSpan:
        return self.all(name, kind)[0]


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    return provider


@pytest.fixture
def ended(provider: TracerProvider) -> Ended:
    ended = Ended()
    provider.add_span_processor(ended)
    return ended


@pytest.fixture
def tracer(provider: TracerProvider) -> trace.Tracer:
    return trace.get_tracer("test")


class Calculator:
    def __init__(self, gate: threading.Event | None = None, waits: threading.Event | None = None) -> None:
        self.gate = gate
        self.waits = waits  # set when `wait` has begun

    def add(self, a: int, b: int) -> int:
        with trace.get_tracer("test").start_as_current_span("adding"):
            return a + b

    async def later(self, a: int, b: int) -> int:
        await asyncio.sleep(0)
        with trace.get_tracer("test").start_as_current_span("adding later"):
            return a + b

    def ask(self, ctx: ActorContext, name: str) -> int:
        pool: ActorPool[Any] = ActorPool(ctx.cluster, name)
        found: int = pool.call().add(1, 2)
        return found

    def fail(self) -> None:
        raise ValueError("bad")

    def wait(self) -> None:
        assert self.gate is not None
        assert self.waits is not None
        self.waits.set()
        assert self.gate.wait(TIMEOUT_S)

    def current(self) -> bool:
        return trace.get_current_span().get_span_context().is_valid


@actor(codec="json", name="json")
class JsonCalculator(Calculator):
    pass


@actor(max_concurrency=4, name="many")
class ManyCalculator(Calculator):
    pass


@pytest.fixture
def actors() -> Iterator[LocalActors]:
    with LocalActors() as actors:
        yield actors


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    found: int = span.context.span_id
    return found


@pytest.mark.parametrize("kind", [Calculator, JsonCalculator, ManyCalculator])
def test_a_call_has_a_span_at_either_end(
    actors: LocalActors, ended: Ended, tracer: trace.Tracer, kind: type[Calculator]
) -> None:
    pool: ActorPool[Any] = actors.deploy(kind, name="calc")
    with tracer.start_as_current_span("mine") as mine:
        assert pool.call().add(2, 3) == 5
        assert pool.call().later(2, 3) == 5
    for method, inner_name in (("add", "adding"), ("later", "adding later")):
        client = ended.one(f"calc/{method}", SpanKind.CLIENT)
        server = ended.one(f"calc/{method}", SpanKind.SERVER)
        inner = ended.one(inner_name, SpanKind.INTERNAL)
        assert parent_of(client) == mine.get_span_context().span_id
        assert parent_of(server) == id_of(client)
        assert parent_of(inner) == id_of(server)
        for span in (client, server):
            attributes = dict(span.attributes or {})
            assert attributes["rpc.system"] == "fluster"
            assert (attributes["rpc.service"], attributes["rpc.method"]) == ("calc", method)
            assert attributes["messaging.system"] == "nats"
            assert span.status.status_code is StatusCode.UNSET
    assert pool.call().current() is False  # nothing is left where calls are run


def test_errors_stand_in_both_spans(actors: LocalActors, ended: Ended, tracer: trace.Tracer) -> None:
    pool = actors.deploy(Calculator)
    with tracer.start_as_current_span("mine"):
        with pytest.raises(ValueError, match="bad"):
            pool.call().fail()
        with pytest.raises(ActorNotFoundError):
            actors.pool("nobody").call().add()
    server = ended.one("Calculator/fail", SpanKind.SERVER)
    assert (server.status.status_code, server.status.description) == (StatusCode.ERROR, "bad")
    assert (server.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in server.events] == ["exception"]
    assert ended.one("Calculator/fail", SpanKind.CLIENT).status.status_code is StatusCode.ERROR
    lost = ended.one("nobody/add", SpanKind.CLIENT)
    assert (lost.attributes or {})["error.type"] == "ActorNotFoundError"


def test_calls_that_are_not_answered_end_their_spans_too(
    actors: LocalActors, ended: Ended, tracer: trace.Tracer
) -> None:
    gate, waits = threading.Event(), threading.Event()
    pool = actors.deploy(Calculator, gate, waits)
    with tracer.start_as_current_span("mine"):
        late = pool.submit(timeout=5).wait()
    assert waits.wait(TIMEOUT_S)  # one whose time is over before it begins is never run
    actors.clock.advance(5)
    with pytest.raises(ActorTimeoutError):
        late.result(TIMEOUT_S)
    client = ended.one("Calculator/wait", SpanKind.CLIENT)
    assert (client.attributes or {})["error.type"] == "ActorTimeoutError"
    gate.set()
    ended.one("Calculator/wait", SpanKind.SERVER)


def test_a_trace_goes_on_through_actors(actors: LocalActors, ended: Ended, tracer: trace.Tracer) -> None:
    actors.deploy(Calculator, name="second")
    pool: ActorPool[Any] = actors.deploy(Calculator, name="first")
    with tracer.start_as_current_span("mine"):
        assert pool.call().ask("second") == 3
    first, second = ended.one("first/ask", SpanKind.SERVER), ended.one("second/add", SpanKind.CLIENT)
    assert parent_of(second) == id_of(first)
    assert parent_of(ended.one("second/add", SpanKind.SERVER)) == id_of(second)


@pytest.mark.parametrize("kind", [Calculator, JsonCalculator])
def test_all_members_are_below_a_broadcast(
    actors: LocalActors, ended: Ended, tracer: trace.Tracer, kind: type[Calculator]
) -> None:
    pool = actors.deploy(kind, name="calc", replicas=2)
    with tracer.start_as_current_span("mine"):
        assert pool.broadcast().add(1, 2).results(TIMEOUT_S) == [3, 3]
    client = ended.one("calc/add", SpanKind.CLIENT)
    assert (client.attributes or {})["fluster.broadcast"] is True
    assert {parent_of(each) for each in ended.all("calc/add", SpanKind.SERVER, 2)} == {id_of(client)}


def test_without_a_span_that_records_nothing_is_traced(actors: LocalActors, ended: Ended) -> None:
    pool = actors.deploy(Calculator)
    assert tracing.begin_call("calc", "add") is None
    assert tracing.announce("calc", "add") is None
    assert tracing.job_environment() == {}
    assert pool.call().current() is False
    assert ended.spans == []


def test_a_job_continues_the_trace_in_which_it_was_launched(
    tracer: trace.Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = JobRequest(name="job", entrypoint=Entrypoint(command=("true",)))
    own = request.model_copy(update={"environment": EnvironmentConfig(env_vars={"TRACEPARENT": "mine"})})
    assert traced([request, own]) == [request, own]
    with tracer.start_as_current_span("mine") as span:
        launched, as_it_was = traced([request, own])
    ids = span.get_span_context()
    traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
    assert launched.environment.env_vars == {"TRACEPARENT": traceparent}
    assert as_it_was == own
    monkeypatch.setenv("TRACEPARENT", traceparent)

    def in_the_job() -> int:
        tracing.continue_trace()
        return trace.get_current_span().get_span_context().span_id

    assert context.get_current() == {}
    assert contextvars.copy_context().run(in_the_job) == ids.span_id


_PLAIN = """
import sys
if {blocked}:
    sys.modules["opentelemetry"] = None
from fluster.testing import LocalActors
from fluster.tracing import continue_trace
class Calculator:
    def add(self, a, b):
        return a + b
with LocalActors() as actors:
    pool = actors.deploy(Calculator)
    assert pool.call().add(1, 2) == 3
    assert pool.broadcast().add(1, 2).results() == [3]
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
continue_trace()
assert not [name for name in sys.modules if name.startswith("opentelemetry.")]
print("done")
"""


@pytest.mark.parametrize("blocked", [True, False])
def test_opentelemetry_is_neither_needed_nor_imported(blocked: bool) -> None:
    environment = {**os.environ, **({"TRACEPARENT": f"00-{1:032x}-{1:016x}-01"} if blocked else {})}
    script = _PLAIN.format(blocked=blocked)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert done.stdout.split() == ["done"], done.stderr
