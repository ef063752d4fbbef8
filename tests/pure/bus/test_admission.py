"""Who becomes a worker by a join token: decisions about records, without a bus."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.core.errors import InvalidNameError, ServiceError
from fluster_bus.messages.workers import JoinedWorker, JoinRequest, JoinTokenRecord
from fluster_services.controller.answers.admission import JoinFacts, admit

NOW = 1_000.0
MINE, JOBS, OTHERS = (Key.generate(KeyKind.USER).public for _ in range(3))
TOKEN = JoinTokenRecord(token_id="join-1", namespaces=("a", "b"), uses=2, expires_at=NOW + 60)
ASKED = JoinRequest(worker_id="w1", key=MINE, job_keys={"a": JOBS})
JOINED = JoinedWorker(worker_id="w1", token_id="join-1", key=MINE, job_keys={"a": JOBS}, joined_at=NOW)
NOBODY = JoinFacts(TOKEN, holder=None, is_taken=False)


def known(**changes: Any) -> JoinFacts:
    return dataclasses.replace(NOBODY, **changes)


def token(**changes: Any) -> JoinFacts:
    return known(token=TOKEN.model_copy(update=changes))


def test_who_has_the_token_gets_the_id_and_a_use_is_gone() -> None:
    admission = admit("join-1", ASKED, NOBODY, now=NOW)
    assert admission.worker == JOINED
    assert admission.token == TOKEN.model_copy(update={"used_by": {MINE: "w1"}})


def test_who_asks_again_changes_nothing_also_when_the_uses_are_gone() -> None:
    used_up = TOKEN.model_copy(update={"used_by": {MINE: "w1", OTHERS: "w2"}})
    admission = admit("join-1", ASKED, known(token=used_up, holder=JOINED), now=NOW)
    assert (admission.worker, admission.token) == (None, None)


def test_who_had_the_id_and_no_answer_gets_the_use() -> None:
    admission = admit("join-1", ASKED, known(holder=JOINED), now=NOW)
    assert admission.worker is None
    assert admission.token is not None


def test_a_worker_that_asks_for_one_more_namespace_keeps_the_keys_that_it_had() -> None:
    more = JoinRequest(worker_id="w1", key=MINE, job_keys={"b": OTHERS})
    admission = admit("join-1", more, known(holder=JOINED), now=NOW)
    assert admission.worker is not None
    assert admission.worker.job_keys == {"a": JOBS, "b": OTHERS}
    assert set(admission.worker.keys) == {MINE, JOBS, OTHERS}


def test_the_id_of_a_revoked_worker_is_free_for_another_key() -> None:
    revoked = JOINED.model_copy(update={"key": OTHERS, "revoked_at": NOW})
    admission = admit("join-1", ASKED, known(holder=revoked), now=NOW)
    assert admission.worker == JOINED


@pytest.mark.parametrize(
    ("there", "request_", "why"),
    [
        (known(token=None), ASKED, "'join-1' is not known"),
        (token(expires_at=NOW), ASKED, "has expired at 1970-01-01 00:16 UTC"),
        (token(uses=1, used_by={OTHERS: "w2"}), ASKED, "used up: 1 of 1"),
        (token(used_by={MINE: "w2"}), ASKED, "this key is of the worker 'w2', and not of 'w1'"),
        (known(is_taken=True), ASKED, "there is a worker or user 'w1' already"),
        (known(holder=JOINED.model_copy(update={"key": OTHERS})), ASKED, "the worker 'w1' is another's"),
        (known(holder=JOINED.model_copy(update={"revoked_at": NOW})), ASKED, "the worker 'w1' were revoked"),
        (known(holder=JOINED.model_copy(update={"job_keys": {"a": OTHERS}})), ASKED, "other keys for its jobs"),
        (NOBODY, JoinRequest(worker_id="w1", key=MINE, job_keys={"c": JOBS}), "good for a, b, not for c"),
        (NOBODY, JoinRequest(worker_id="w1", key=MINE, job_keys={}), "good for a, b, and none was asked for"),
        (NOBODY, JoinRequest(worker_id="w1", key=MINE, job_keys={"a": MINE}), "a key is named twice"),
        (NOBODY, JoinRequest(worker_id="w1", key="nonsense", job_keys={"a": JOBS}), "'nonsense' is not the public key"),
        (NOBODY, JoinRequest(worker_id="w1", key=MINE, job_keys={"a": "A" + JOBS[1:]}), "is not the public key"),
    ],
    ids=[
        "unknown",
        "expired",
        "used-up",
        "key-of-another-id",
        "taken",
        "anothers",
        "revoked",
        "other-job-keys",
        "namespace",
        "no-namespace",
        "one-key",
        "no-key",
        "account",
    ],
)
def test_who_is_refused_is_told_why(there: JoinFacts, request_: JoinRequest, why: str) -> None:
    with pytest.raises(ServiceError, match=why) as caught:
        admit("join-1", request_, there, now=NOW)
    assert caught.value.code == "JoinRefused"


@pytest.mark.parametrize("worker_id", ["", "a.b", "*", "x" * 129])
def test_what_is_no_id_is_refused(worker_id: str) -> None:
    with pytest.raises(InvalidNameError):
        admit("join-1", ASKED.model_copy(update={"worker_id": worker_id}), NOBODY, now=NOW)
