"""Whatever arrives as a message is one that can be passed on, or is refused: it raises nothing else in who reads it."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fluster_bus
import fluster_services
from fluster.actors.protocol.members import Member
from fluster_bus import messages
from fluster_bus.core import buckets, subjects
from fluster_bus.core.errors import InvalidMessageError, InvalidNameError
from fluster_bus.messages import Event, LogBatch, Message, Offer, TaskRecord, WorkerId
from fluster_services import lifecycle


def _kinds_within(kind: type[Message]) -> Iterator[type[Message]]:
    """Those that are sent: a class that others are made from is not."""
    for each in kind.__subclasses__():
        yield from _kinds_within(each) if each.__subclasses__() else [each]


def _all_kinds() -> list[type[Message]]:
    """Each subclass of Message in the packages, exported or not: what one process writes another reads."""
    for package in (fluster_bus, fluster_services):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            if "Message):" in file.read_text():  # to import all others would take seconds
                importlib.import_module(".".join((package.__name__, *file.relative_to(root).with_suffix("").parts)))
    found = {
        each for each in _kinds_within(Message) if each.__module__.startswith(("fluster_bus.", "fluster_services."))
    }
    return sorted(found, key=lambda kind: kind.__name__)


KINDS = _all_kinds()
NUMBERS = [0, -1, 1, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 10**300, 1e308, -0.0, float("nan"), float("inf")]
TEXTS = [
    "",
    "a",
    "a.b",
    "*",
    ">",
    "\0",
    "\x1b[2J",
    "\udce9",
    "caf\xe9",
    "0-9",
    "0-99999999",
    "PENDING",
    "RUNNING",
    "=",
    "x" * 9_000,
]
LEAVES = (
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.integers() | st.text(max_size=4)
)


def _fields(kind: type[Message]) -> list[str]:
    """Its own, those of its parts, and one that it does not have."""
    names = {"newer"}
    for name in kind.model_fields:
        names.add(name)
    return sorted(names)


ALL_FIELDS = sorted({name for kind in KINDS for name in _fields(kind)})
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ALL_FIELDS), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_is_read_can_be_passed_on(kind: type[Message]) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.dictionaries(st.sampled_from(_fields(kind)), VALUES, max_size=6).map(json.dumps) | st.text(max_size=20))
    @example("[" * 50_000)
    @example("null")
    @example("")
    def read(text: str) -> None:
        try:
            message = kind.from_json(text.encode(errors="surrogatepass"))
        except InvalidMessageError:
            return
        assert kind.from_json(message.to_json()).to_json() == message.to_json()

    read()


def test_kinds_that_are_not_exported_are_among_them() -> None:
    names = {kind.__name__ for kind in KINDS}
    assert {"StoredRequest", "TaskStackRequest", "WorkerQuery", "_Manifest", "Manifest", "JoinTokenRecord"} <= names


def _task(**fields: object) -> dict[str, object]:
    return {"job_id": "job", "namespace": "default", "task": 0, "order": 1, **fields}


CLAIMED = [
    "state",
    "attempt",
    "worker_id",
    "epoch",
    "gang",
    "transitions",
    "kill_requested",
    "restart_requested",
    "retry_at",
    "spared",
]


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.sampled_from([*CLAIMED, *sorted(TaskRecord.model_fields)]), VALUES, max_size=4),
    st.integers(-1, 3),
)
@example({"state": "PENDING", "attempt": 1 << 80}, 1)
@example({"state": "BUILDING", "worker_id": "w1", "transitions": []}, 1)
def test_any_task_is_claimed_and_ended_or_left(fields: dict[str, object], attempt: int) -> None:
    try:
        record = TaskRecord.from_json(json.dumps({**fields, **_task()}).encode())
    except InvalidMessageError:
        return
    worker = WorkerId("w1")
    claimed = lifecycle.claim(
        record, attempt=attempt, worker_id=worker, now=time.time(), epoch=record.epoch, stored_at=None
    )
    for held in (record, claimed):
        if held is not None:
            lifecycle.end(
                held, attempt=attempt, worker_id=worker, now=time.time(), state=messages.JobStatus.FAILED, reason="r"
            )
            lifecycle.request_kill(held, now=time.time(), reason="enough")


@given(st.dictionaries(st.sampled_from(sorted(LogBatch.model_fields)), VALUES, max_size=5))
@example({"offset": 0, "next_offset": 1, "lines": [[float("nan"), "a"]]})
@example({"offset": -1, "next_offset": -5, "lines": [[0, "a"]], "going_on": [7, -1]})
def test_lines_of_any_batch_are_shown_or_refused(fields: dict[str, object]) -> None:
    try:
        batch = LogBatch.from_json(json.dumps(fields).encode())
    except InvalidMessageError:
        return
    assert all(isinstance(text, str) for _time, text in batch.lines)


@given(st.dictionaries(st.sampled_from(sorted(messages.Endpoint.model_fields)), VALUES, max_size=6))
@example({"metadata": {"restarts": "-1"}})
@example({"address": "fluster.default.actors.x.one.e", "metadata": {"timeouts": '{"a": -1}'}})
def test_any_endpoint_is_a_member_or_none(fields: dict[str, object]) -> None:
    own = {"endpoint_id": "e1", "name": "ledger", "namespace": "default"}
    address = subjects.actor_member("default", "ledger", "e1")
    try:
        member = Member.of(messages.Endpoint.from_json(json.dumps({"address": address, **fields, **own}).encode()))
    except (InvalidMessageError, InvalidNameError):
        return
    assert subjects.is_actor_address(member.address, "default")


@given(st.dictionaries(st.sampled_from(sorted(Event.model_fields)), VALUES, max_size=4))
def test_any_event_has_a_record_that_it_is_of(fields: dict[str, object]) -> None:
    try:
        event = Event.from_json(json.dumps(fields).encode())
        subjects.events("default", event.job_id)
    except (InvalidMessageError, InvalidNameError):
        return


@given(st.dictionaries(st.sampled_from(sorted(Offer.model_fields)), VALUES, max_size=6))
def test_any_offer_names_a_task_or_is_refused(fields: dict[str, object]) -> None:
    try:
        offer = Offer.from_json(json.dumps(fields).encode())
        buckets.task_key(offer.job_id, offer.task)
    except (InvalidMessageError, InvalidNameError):
        return
