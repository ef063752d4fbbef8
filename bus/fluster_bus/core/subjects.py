"""Every subject of Fluster is spelled and taken apart here, and nowhere else.

Streams, buckets and keys are named in `buckets.py`, the subjects on which servers answer in `server_subjects.py`.

The comment at each function shows the finished string. Names are checked, so nothing that a person chose can
widen a subject (`*`, `>`) or reach into another namespace (`.`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fluster_bus.core.names import SYSTEM_NAMESPACE, check_name, check_namespace

_ROOT = "fluster"
_PLAIN_TOKEN = re.compile(r"[!-)+-=?-~]+")  # ASCII without white space and wildcards
_SYS = f"{_ROOT}.sys"

ANY_TOKEN = "*"
ANY_TAIL = ">"
# In the permissions of a role: nats-server puts there what a user's token says.
OWN_NAMESPACE, OWN_NAME = "{{tag(ns)}}", "{{name()}}"


def checked_token(kind: str, value: str) -> str:
    """`value` if it can be one token of a subject or key, or stands for one: `*`, or what the server puts in its place.

    Raises InvalidNameError.
    """
    return value if value in (ANY_TOKEN, OWN_NAME, OWN_NAMESPACE) else check_name(kind, value)


def _ns(namespace: str) -> str:
    return namespace if namespace in (ANY_TOKEN, OWN_NAMESPACE) else check_namespace(namespace)


# ---- jobs -----------------------------------------------------------------------------------------------


def jobs_submit(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.jobs.submit"  # fluster.default.jobs.submit


JOB_VERBS = ("status", "list", "terminate", "explain", "stack", "flush", "own")


def jobs_verb(namespace: str, verb: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.jobs.{checked_token('verb', verb)}"  # fluster.default.jobs.status


def ensure_namespace(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.ensure"  # fluster.default.ensure


def workers_list(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.workers.list"  # fluster.default.workers.list


ENDPOINT_VERBS = ("register", "unregister", "lookup", "list")


def endpoints_verb(namespace: str, verb: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.endpoints.{checked_token('verb', verb)}"  # fluster.default.endpoints.lookup


def watch_jobs(namespace: str, key: str = ANY_TAIL) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.jobs.{key}"  # fluster.default.watch.jobs.train-1.0


def watch_endpoints(namespace: str, key: str = ANY_TAIL) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.endpoints.{key}"  # fluster.default.watch.endpoints.calculator.>


def watch_logs(namespace: str, tail: str = ANY_TAIL) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.logs.{tail}"  # fluster.default.watch.logs.train-1.0.1.stdout


def watch_events(namespace: str, job: str = ANY_TAIL) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.events.{job}"  # fluster.default.watch.events.train-1


def watch_progress(namespace: str, job: str = ANY_TOKEN, task: str = ANY_TOKEN) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.progress.{checked_token('job', job)}.{task}"  # fluster.default.watch.progress.train-1.0


def watch_actors(namespace: str, key: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.actors.{key}"  # fluster.default.watch.actors.seat.ledger


def watch_calls(namespace: str, name: str = ANY_TAIL) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.calls.{name}"  # fluster.default.watch.calls.ledger


def watch_any(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.watch.{ANY_TAIL}"  # fluster.default.watch.>


def logs(namespace: str, job: str, task: str = ANY_TOKEN, attempt: str = ANY_TOKEN, stream: str = ANY_TOKEN) -> str:
    # fluster.default.logs.train-1.0.1.stdout
    return f"{_ROOT}.{_ns(namespace)}.logs.{checked_token('job', job)}.{task}.{attempt}.{stream}"


def events(namespace: str, job: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.events.{checked_token('job', job)}"  # fluster.default.events.train-1


def events_of_all(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.events.{ANY_TAIL}"  # fluster.default.events.>


def logs_of_all(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.logs.{ANY_TAIL}"  # fluster.default.logs.>


def object_part(kind: str, namespace: str, sha256: str, number: int) -> str:
    return f"{_object(kind, namespace, sha256)}.{number}"  # fluster.default.bundles.9f86d0….0


def object_manifest(kind: str, namespace: str, sha256: str) -> str:
    return f"{_object(kind, namespace, sha256)}.manifest"  # fluster.default.bundles.9f86d0….manifest


def is_object_part(subject: str, kind: str, namespace: str, sha256: str) -> bool:
    return subject.startswith(f"{_object(kind, namespace, sha256)}.")


def object_messages(kind: str, namespace: str, sha256: str) -> str:
    return f"{_object(kind, namespace, sha256)}.{ANY_TAIL}"  # fluster.default.requests.9f86d0….>


def _object(kind: str, namespace: str, sha256: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.{check_name('kind', kind)}.{check_name('SHA-256', sha256)}"


def objects_of_all(kind: str, namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.{check_name('kind', kind)}.{ANY_TAIL}"  # fluster.default.bundles.>


def result_part(namespace: str, job: str, task: int, attempt: int, number: int) -> str:
    # fluster.default.results.train-1.0.1.0
    return f"{_ROOT}.{_ns(namespace)}.results.{checked_token('job', job)}.{task}.{attempt}.{number}"


def results_of_job(namespace: str, job: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.results.{check_name('job', job)}.{ANY_TAIL}"  # fluster.default.results.train-1.>


def results_of_all(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.results.{ANY_TAIL}"  # fluster.default.results.>


def secrets(namespace: str, submission: str = ANY_TOKEN) -> str:
    return f"{_ROOT}.{_ns(namespace)}.secrets.{submission}"  # fluster.default.secrets.3f2a


def logs_of_job(namespace: str, job: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.logs.{checked_token('job', job)}.{ANY_TAIL}"  # fluster.default.logs.train-1.>


def namespace_of(subject: str) -> str:
    """The namespace that a subject belongs to. Raises InvalidNameError when it is none of ours."""
    tokens = subject.split(".")
    return check_namespace(tokens[1] if tokens[0] == _ROOT and len(tokens) > 2 else "")


# ---- the cluster's own ----------------------------------------------------------------------------------


def dispatch(namespace: str, device: str, variant: str, count: int, *, cpu: str, memory: str) -> str:
    # fluster.default.dispatch.gpu.h100.8.c4.m32768
    place = f"{checked_token('device', device)}.{checked_token('variant', variant)}.{count}.{cpu}.{memory}"
    return f"{_ROOT}.{_ns(namespace)}.dispatch.{place}"


def dispatch_any(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.dispatch.{ANY_TAIL}"  # fluster.default.dispatch.>


DISPATCH_QUEUE = "workers"


WORKER_VERBS = ("offer", "run", "status", "list", "logs", "stack", "flush", "kill", "health", "drain")


def worker_verb(worker: str, verb: str) -> str:
    return (
        f"{_SYS}.workers.{checked_token('worker', worker)}.{checked_token('verb', verb)}"  # fluster.sys.workers.w1.look
    )


def heartbeats(worker: str = ANY_TOKEN) -> str:
    return f"{_SYS}.heartbeats.{checked_token('worker', worker)}"  # fluster.sys.heartbeats.w1


def watch_workers(key: str = ANY_TAIL) -> str:
    return f"{_SYS}.watch.workers.{key}"  # fluster.sys.watch.workers.w1


def watch_controllers(key: str = ANY_TAIL) -> str:
    return f"{_SYS}.watch.controllers.{key}"  # fluster.sys.watch.controllers.leader


def capacity() -> str:
    return f"{_SYS}.capacity"  # fluster.sys.capacity


def join(token: str) -> str:
    """Where a join token is exchanged: its user alone may ask there, so that the subject says who asks."""
    return f"{_SYS}.join.{checked_token('join token', token)}"  # fluster.sys.join.join-3f2a9c1b


def watch_joins(key: str = ANY_TAIL) -> str:
    return f"{_SYS}.watch.joins.{key}"  # fluster.sys.watch.joins.worker.w1


NAMESPACE_VERBS = ("add", "set", "drop", "list")


def namespaces_verb(verb: str) -> str:
    """Where operators ask for namespaces; tenants may not."""
    return f"{_SYS}.namespaces.{checked_token('verb', verb)}"  # fluster.sys.namespaces.add


def watch_namespaces(key: str = ANY_TAIL) -> str:
    return f"{_SYS}.watch.namespaces.{key}"  # fluster.sys.watch.namespaces.team-a


ROOM = f"{_SYS}.room"  # fluster.sys.room


def vm_trouble() -> str:
    """Where the keeper of VMs says why one of them is not there."""
    return f"{_SYS}.vms.trouble"  # fluster.sys.vms.trouble


# ---- actors ---------------------------------------------------------------------------------------------


def actor_any(namespace: str, name: str, method: str = ANY_TOKEN) -> str:
    return f"{_ROOT}.{_ns(namespace)}.actors.{checked_token('actor', name)}.any.{checked_token('method', method)}"


def is_call(namespace: str, name: str, subject: str) -> bool:
    """True for where any member of that pool is called."""
    head, _, method = subject.rpartition(".")
    return head == actor_any(namespace, name).removesuffix(f".{ANY_TOKEN}") and bool(_PLAIN_TOKEN.fullmatch(method))


def actor_one(namespace: str, name: str, endpoint: str, method: str = ANY_TOKEN) -> str:
    # fluster.default.actors.calculator.one.5f2c…
    return f"{actor_member(namespace, name, endpoint)}.{checked_token('method', method)}"


def actor_member(namespace: str, name: str, endpoint: str) -> str:
    """The address of one member: a method's name follows it."""
    return f"{_ROOT}.{_ns(namespace)}.actors.{checked_token('actor', name)}.one.{checked_token('endpoint', endpoint)}"


def is_actor_address(address: str, namespace: str) -> bool:
    """True for what is below the subjects of that namespace's actors: calls to a member go nowhere else."""
    parts = address.split(".")
    return (
        parts[:3] == [_ROOT, _ns(namespace), "actors"]
        and len(parts) > 3
        and all(_PLAIN_TOKEN.fullmatch(each) for each in parts)
    )


def method_of_member(address: str, method: str) -> str:
    """The subject of a method of the member at `address` (which came from `actor_member`)."""
    return f"{address}.{checked_token('method', method)}"


def actor_all(namespace: str, name: str, method: str = ANY_TOKEN) -> str:
    return f"{_ROOT}.{_ns(namespace)}.actors.{checked_token('actor', name)}.all.{checked_token('method', method)}"


def durable_calls(namespace: str, name: str) -> str:
    """Where calls to a durable actor are stored."""
    return f"{_ROOT}.{_ns(namespace)}.durable.{check_name('actor', name)}"  # fluster.default.durable.ledger


def durable_calls_of_all(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.durable.{ANY_TAIL}"  # fluster.default.durable.>


def trim_calls(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.trim-calls"  # fluster.default.trim-calls


# ---- inboxes --------------------------------------------------------------------------------------------

_INBOX = "_INBOX"
_INBOXES = f"{_INBOX}."


def inbox_prefix(user: str, namespace: str = SYSTEM_NAMESPACE) -> str:
    """Where replies to `user` go that come from `namespace`: each user may listen only below its own."""
    return f"{_INBOX}.{namespace}.{user}"  # _INBOX.default.alice


def worker_user(name: str) -> str:
    """For `inbox_prefix`, the name of a worker with signed credentials.

    A machine that joins by a token chooses its name, which may be that of a controller. No user has a name with a colon.
    """
    return f"worker:{name}"  # worker:w1


def inboxes_of(namespace: str) -> str:
    """Where all answers go that come from a namespace, and nothing else."""
    return f"{_INBOX}.{checked_token('namespace', namespace)}.{ANY_TAIL}"  # _INBOX.default.>


ALL_INBOXES = f"{_INBOX}.{ANY_TAIL}"
# Where programs hear replies that know nothing of Fluster, such as the plain `nats` command. Ours have more tokens.
PLAIN_INBOXES = (f"{_INBOX}.*", f"{_INBOX}.*.*")


def asked_namespace(subject: str) -> str | None:
    """The namespace whose users answer requests on `subject`, as its actors or at their inboxes; None when the cluster's services do."""
    tokens = subject.split(".", 3)
    if len(tokens) <= 3 or tokens[1] == SYSTEM_NAMESPACE:
        return None
    is_tenants = tokens[0] == _INBOX or (tokens[0] == _ROOT and tokens[2] == "actors")
    return tokens[1] if is_tenants else None


def is_inbox(subject: str) -> bool:
    """True for a reply subject. Services refuse any other, else a caller could make them write anywhere."""
    return subject.startswith(_INBOXES)


def submit_delivery(inbox: str) -> str:
    """Where the stream pushes to one reader of submissions, below an inbox of that reader's."""
    return f"{inbox}.submissions"


# ---- taking subjects apart ------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogSubject:
    """Where a batch of log lines belongs."""

    namespace: str
    job: str
    task: int
    attempt: int
    stream: str


def parse_logs(subject: str) -> LogSubject:
    """Take `fluster.<ns>.logs.<job>.<task>.<attempt>.<stream>` apart."""
    _root, namespace, _logs, job, task, attempt, stream = subject.split(".")
    return LogSubject(namespace, job, int(task), int(attempt), stream)


def last_token(subject: str) -> str:
    """The method of a call, the worker of a heartbeat, the token of a reply."""
    return subject.rpartition(".")[2]


def reply_number(subject: str) -> int:
    """The number at the end of a reply's subject, which is its sender's word: 0, which no message has, where there is none."""
    try:
        return int(subject.rpartition(".")[2])
    except ValueError:
        return 0


# ---- what the permissions of a role are made of ----------------------------------------------------------


def below(subject: str) -> str:
    """Everything below a subject."""
    return f"{subject}.{ANY_TAIL}"


def actors_of(namespace: str) -> str:
    return f"{_ROOT}.{_ns(namespace)}.actors.{ANY_TAIL}"  # fluster.default.actors.>


# Everything of Fluster.
ALL_MESSAGES = f"{_ROOT}.{ANY_TAIL}"

# Of all namespaces: what streams take in, and what they publish again.
STREAM_INPUTS = (
    jobs_submit(ANY_TOKEN),
    f"{_ROOT}.*.logs.{ANY_TAIL}",
    f"{_ROOT}.*.events.{ANY_TAIL}",
    f"{_ROOT}.*.bundles.{ANY_TAIL}",
    f"{_ROOT}.*.payloads.{ANY_TAIL}",
    f"{_ROOT}.*.requests.{ANY_TAIL}",
    f"{_ROOT}.*.results.{ANY_TAIL}",
    f"{_ROOT}.*.secrets.{ANY_TOKEN}",
    f"{_ROOT}.*.durable.{ANY_TAIL}",
)
STREAM_OUTPUT = f"{_ROOT}.*.watch.{ANY_TAIL}"
