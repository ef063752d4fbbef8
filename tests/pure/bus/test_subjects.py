"""Every subject, as the finished string; nothing that a person chose widens one or reaches elsewhere."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.names import MAX_NAME_LENGTH, check_name, check_namespace, unique_name

NAMES = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=MAX_NAME_LENGTH)
BAD_NAMES = [
    "",
    "a.b",
    "*",
    ">",
    "a*",
    "a>",
    "a b",
    " a",
    "a\n",
    "a\tb",
    "ä",
    "имя",
    "a/b",
    "$KV",
    "a\0",
    "x" * (MAX_NAME_LENGTH + 1),
]


@given(NAMES)
def test_good_names_come_back(name: str) -> None:
    assert check_name("job", name) == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused_with_the_value_quoted(name: str) -> None:
    with pytest.raises(InvalidNameError) as raised:
        check_name("job id", name)
    assert repr(name) in str(raised.value)
    assert "job id" in str(raised.value)


@pytest.mark.parametrize("name", [None, 5, b"bytes", ["list"]])
def test_what_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(InvalidNameError, match="invalid job"):
        check_name("job", name)  # type: ignore[arg-type]


def test_a_very_long_value_is_quoted_in_part() -> None:
    with pytest.raises(InvalidNameError) as raised:
        check_name("job", "x" * 1_000_000)
    assert len(str(raised.value)) < 500


def test_no_tenant_has_the_clusters_own_namespace() -> None:
    with pytest.raises(InvalidNameError, match="'sys'"):
        check_namespace("sys")


@given(NAMES)
def test_unique_names_are_names(prefix: str) -> None:
    first, second = unique_name(prefix), unique_name(prefix)
    assert first != second
    assert check_name("job", first) == first
    assert first.startswith(prefix[:100])


@pytest.mark.parametrize(
    ("built", "finished"),
    [
        (subjects.jobs_submit("default"), "fluster.default.jobs.submit"),
        (subjects.jobs_submit(subjects.ANY_TOKEN), "fluster.*.jobs.submit"),
        (subjects.jobs_verb("default", "status"), "fluster.default.jobs.status"),
        (subjects.ensure_namespace("default"), "fluster.default.ensure"),
        (subjects.workers_list("default"), "fluster.default.workers.list"),
        (subjects.endpoints_verb("default", "lookup"), "fluster.default.endpoints.lookup"),
        (subjects.watch_jobs("default"), "fluster.default.watch.jobs.>"),
        (subjects.watch_jobs("default", "train-1.0"), "fluster.default.watch.jobs.train-1.0"),
        (subjects.watch_endpoints("default", "calc.>"), "fluster.default.watch.endpoints.calc.>"),
        (subjects.watch_logs("default"), "fluster.default.watch.logs.>"),
        (subjects.watch_events("default", "train-1"), "fluster.default.watch.events.train-1"),
        (subjects.watch_any("default"), "fluster.default.watch.>"),
        (subjects.logs("default", "train-1", "0", "1", "stdout"), "fluster.default.logs.train-1.0.1.stdout"),
        (subjects.logs_of_job("default", "train-1"), "fluster.default.logs.train-1.>"),
        (subjects.logs_of_all("default"), "fluster.default.logs.>"),
        (subjects.events("default", "train-1"), "fluster.default.events.train-1"),
        (subjects.events_of_all("default"), "fluster.default.events.>"),
        (
            subjects.dispatch("a", "gpu", "h100", 8, cpu="c4000m", memory="m32768"),
            "fluster.a.dispatch.gpu.h100.8.c4000m.m32768",
        ),
        (subjects.worker_verb("w1", "look"), "fluster.sys.workers.w1.look"),
        (subjects.heartbeats("w1"), "fluster.sys.heartbeats.w1"),
        (subjects.heartbeats(), "fluster.sys.heartbeats.*"),
        (subjects.watch_workers(), "fluster.sys.watch.workers.>"),
        (subjects.capacity(), "fluster.sys.capacity"),
        (subjects.actor_any("default", "calc", "add"), "fluster.default.actors.calc.any.add"),
        (subjects.actor_any("default", "calc"), "fluster.default.actors.calc.any.*"),
        (subjects.actor_one("default", "calc", "e1", "add"), "fluster.default.actors.calc.one.e1.add"),
        (subjects.actor_member("default", "calc", "e1"), "fluster.default.actors.calc.one.e1"),
        (
            subjects.method_of_member("fluster.default.actors.calc.one.e1", "add"),
            "fluster.default.actors.calc.one.e1.add",
        ),
        (subjects.actor_all("default", "calc", "add"), "fluster.default.actors.calc.all.add"),
        (subjects.actors_of("default"), "fluster.default.actors.>"),
        (subjects.inbox_prefix("operator"), "_INBOX.sys.operator"),
        (subjects.inbox_prefix("alice", "default"), "_INBOX.default.alice"),
        (buckets.jobs_bucket("default"), "fluster_jobs_default"),
        (buckets.endpoints_bucket("default"), "fluster_endpoints_default"),
        (buckets.events_stream("default"), "FLUSTER_EVENTS_default"),
        (buckets.logs_stream("default"), "FLUSTER_LOGS_default"),
        (buckets.bucket_stream("fluster_workers"), "KV_fluster_workers"),
        (buckets.bucket_key("fluster_workers", "w1"), "$KV.fluster_workers.w1"),
        (buckets.bucket_key("fluster_workers"), "$KV.fluster_workers.>"),
        (buckets.key_of("fluster_workers", "$KV.fluster_workers.w1"), "w1"),
        (server_subjects.direct_get("KV_x"), "$JS.API.DIRECT.GET.KV_x"),
        (server_subjects.message_delete("KV_x"), "$JS.API.STREAM.MSG.DELETE.KV_x"),
        (buckets.task_key("train-1", 0), "train-1.0"),
        (buckets.attempt_key("default", "train-1", 0, 2), "default.train-1.0.2"),
        (buckets.endpoints_of_attempt("train-1", 0, 2), "*.train-1.0.2.*"),
        (buckets.endpoint_key("calc", "train-1", 0, 2, "e1"), "calc.train-1.0.2.e1"),
        (buckets.endpoints_named("calc"), "calc.>"),
        (server_subjects.service_verb("PING"), "$SRV.PING"),
        (server_subjects.service_verb("INFO", "calc"), "$SRV.INFO.calc"),
        (server_subjects.service_verb("STATS", "calc", "e1"), "$SRV.STATS.calc.e1"),
        (subjects.below("$SRV.PING"), "$SRV.PING.>"),
    ],
)
def test_finished_strings(built: str, finished: str) -> None:
    assert built == finished


# Each takes the name that a person chose; "*" is a wildcard to some of them, so it is tried apart.
NAMED_BUILDERS: list[Callable[[str], str]] = [
    subjects.jobs_submit,
    subjects.ensure_namespace,
    subjects.workers_list,
    subjects.watch_jobs,
    subjects.watch_endpoints,
    subjects.watch_logs,
    subjects.watch_events,
    subjects.watch_any,
    subjects.events_of_all,
    subjects.logs_of_all,
    subjects.actors_of,
    buckets.jobs_bucket,
    buckets.endpoints_bucket,
    buckets.events_stream,
    buckets.logs_stream,
    subjects.heartbeats,
    buckets.endpoints_named,
    lambda name: subjects.jobs_verb("default", name),
    lambda name: subjects.endpoints_verb("default", name),
    lambda name: subjects.logs("default", name),
    lambda name: subjects.logs_of_job("default", name),
    lambda name: subjects.events("default", name),
    lambda name: subjects.dispatch("a", name, "none", 0, cpu="c1", memory="m1"),
    lambda name: subjects.dispatch("a", "gpu", name, 0, cpu="c1", memory="m1"),
    lambda name: subjects.worker_verb(name, "look"),
    lambda name: subjects.worker_verb("w1", name),
    lambda name: subjects.actor_any("default", name),
    lambda name: subjects.actor_any("default", "calc", name),
    lambda name: subjects.actor_one("default", "calc", name),
    lambda name: subjects.actor_member("default", name, "e1"),
    lambda name: subjects.method_of_member("fluster.default.actors.calc.one.e1", name),
    lambda name: subjects.actor_all("default", name),
    lambda name: buckets.task_key(name, 0),
    lambda name: buckets.attempt_key("default", name, 0, 1),
    lambda name: buckets.endpoints_of_attempt(name, 0, 1),
    lambda name: buckets.endpoint_key(name, "job", 0, 1, "e1"),
    lambda name: buckets.endpoint_key("calc", name, 0, 1, "e1"),
    lambda name: buckets.endpoint_key("calc", "job", 0, 1, name),
]


@pytest.mark.parametrize("name", [name for name in BAD_NAMES if name != "*"])
def test_every_builder_refuses_what_is_no_name(name: str) -> None:
    for build in NAMED_BUILDERS:
        with pytest.raises(InvalidNameError):
            build(name)


@pytest.mark.parametrize(
    "build",
    [
        lambda: buckets.endpoint_key("calc", "*", 0, 1, "e1"),
        lambda: buckets.endpoint_key("calc", "job", 0, 1, "*"),
        lambda: buckets.endpoint_key("*", "job", 0, 1, "e1"),
        lambda: buckets.task_key("*", 0),
        lambda: buckets.endpoints_named("*"),
        lambda: buckets.jobs_bucket("*"),
        lambda: subjects.namespace_of("fluster.*.jobs.submit"),
    ],
)
def test_a_key_or_bucket_is_never_a_wildcard(build: Callable[[], str]) -> None:
    with pytest.raises(InvalidNameError):
        build()


@given(NAMES.filter(lambda name: name != "sys"), NAMES)
def test_the_namespace_of_a_subject(namespace: str, job: str) -> None:
    assert subjects.namespace_of(subjects.jobs_submit(namespace)) == namespace
    assert subjects.namespace_of(subjects.events(namespace, job)) == namespace


@pytest.mark.parametrize(
    "subject", ["", "fluster", "fluster.default", "other.default.jobs.submit", "fluster.sys.capacity"]
)
def test_subjects_of_no_namespace(subject: str) -> None:
    with pytest.raises(InvalidNameError):
        subjects.namespace_of(subject)


@given(NAMES.filter(lambda name: name != "sys"), NAMES, st.integers(0, 9999), st.integers(1, 9999))
def test_log_subjects_are_taken_apart_again(namespace: str, job: str, task: int, attempt: int) -> None:
    parsed = subjects.parse_logs(subjects.logs(namespace, job, str(task), str(attempt), "stderr"))
    assert parsed == subjects.LogSubject(namespace, job, task, attempt, "stderr")


@given(NAMES, st.integers(0, 9999))
def test_keys_of_tasks_and_of_jobs_are_told_apart(job: str, task: int) -> None:
    assert buckets.is_task_key(buckets.task_key(job, task))
    assert not buckets.is_task_key(job)


def test_inboxes() -> None:
    assert subjects.is_inbox(f"{subjects.inbox_prefix('operator')}.abc.1")
    assert subjects.is_inbox("_INBOX.abc.1")
    for subject in ("", "fluster.sys.workers.w1.look", "$JS.API.INFO", "$KV.fluster_jobs_default.a", "x._INBOX.a"):
        assert not subjects.is_inbox(subject)
    assert subjects.last_token("_INBOX_operator.secret.1f") == "1f"
    assert subjects.last_token("alone") == "alone"


@pytest.mark.parametrize(
    ("subject", "namespace"),
    [
        ("fluster.a.actors.x.y", "a"),
        ("_INBOX.a.job_a.xyz.ref", "a"),  # of a Ref, or of one who reads a stream of results
        ("_INBOX.sys.operator.xyz.1", None),
        ("fluster.a.jobs.list", None),
        ("fluster.sys.workers.w.kill", None),
        ("$JS.API.INFO", None),
    ],
)
def test_who_answers_a_request_is_known_by_its_subject(subject: str, namespace: str | None) -> None:
    assert subjects.asked_namespace(subject) == namespace
