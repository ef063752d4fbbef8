"""What each role may send and hear: lists of subjects, of which everything else is refused.

A server with a list of users gets them with names of namespaces; signed tokens name the namespaces of their users, and the
server puts those in the place of OWN_NAMESPACE and OWN_NAME.

Replies are allowed by inbox: each user hears only what is below its own, and others may send there if they have
reason to answer it. (The server's `allow_responses` would do it by bookkeeping for each message, and lose the replies
of calls that take longer than its expiry.) What follows the prefix is random, so no user sends where it was not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.names import SYSTEM_NAMESPACE
from fluster_bus.core.roles import Permissions, Role
from fluster_bus.core.stream_bounds import BUNDLES, PAYLOADS, REQUESTS
from fluster_bus.core.subjects import OWN_NAME, OWN_NAMESPACE

_READ = (BUNDLES, PAYLOADS)
_WRITTEN = (*_READ, REQUESTS)  # only services read requests


def scoped(role: Role) -> Permissions:
    """What users of a role may do whose tokens name them and their namespaces."""
    name = subjects.worker_user(OWN_NAME) if role is Role.WORKER else OWN_NAME
    return granted(role, (OWN_NAMESPACE,), name, workers=OWN_NAME)


def granted(role: Role, namespaces: Sequence[str], name: str, *, workers: str) -> Permissions:
    """What a user with this role in these namespaces may do. `name` is that of its inboxes, `workers` its worker id if it is a worker."""
    match role:
        case Role.OPERATOR:
            return Permissions(publish=(subjects.ANY_TAIL,), subscribe=(subjects.ANY_TAIL,))
        case Role.SERVICE:
            everything = (
                subjects.ALL_MESSAGES,
                server_subjects.ALL_BUCKETS,
                server_subjects.ALL_OBJECTS,
                server_subjects.ALL_SERVICES,
                server_subjects.JETSTREAM_REQUESTS,
            )
            flow = (server_subjects.JETSTREAM_ACKS, server_subjects.JETSTREAM_FLOW)
            return Permissions((*everything, *flow, subjects.ALL_INBOXES), (*everything, _inbox(name)))
        case Role.WORKER:
            return _worker(namespaces, name, workers)
        case Role.GATEWAY:
            return Permissions(
                (_inbox(name), *_of_each(namespaces, lambda each: (_inbox(name, each), *_speaks_for(each)))),
                (
                    _inbox(name),
                    *_of_each(namespaces, lambda each: (_inbox(name, each), subjects.watch_any(each))),
                ),
            )
        case Role.AUTOSCALER:
            return _autoscaler(name)
        case Role.JOIN:
            return Permissions((subjects.join(name), _inbox(name)), (_inbox(name),))
        case Role.CLIENT:
            return Permissions(
                _of_each(namespaces, _asks),
                _of_each(namespaces, lambda each: (_inbox(name, each), subjects.watch_any(each))),
            )
        case Role.JOB:
            return Permissions(
                _of_each(namespaces, lambda each: (*_asks(each), *_serves(each))),
                (
                    *_of_each(namespaces, lambda each: (_inbox(name, each), *_hears(each))),
                    *_announced(),
                ),
            )


def _of_each(namespaces: Sequence[str], some: Callable[[str], Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subject for namespace in namespaces for subject in some(namespace)))


def _inbox(name: str, namespace: str = SYSTEM_NAMESPACE) -> str:
    return subjects.below(subjects.inbox_prefix(name, namespace))


def _worker(namespaces: Sequence[str], name: str, worker: str) -> Permissions:
    """It keeps its own row and sign of life, and the records of tasks of its namespaces."""
    workers = buckets.bucket_stream(buckets.WORKERS_BUCKET)
    return Permissions(
        publish=(
            subjects.heartbeats(worker),
            subjects.capacity(),
            buckets.bucket_key(buckets.WORKERS_BUCKET, worker),
            *_with_below(server_subjects.direct_get(workers)),
            subjects.inboxes_of(SYSTEM_NAMESPACE),  # of controllers and operators, which ask it
            *subjects.PLAIN_INBOXES,
            *_of_each(namespaces, _keeps_tasks),
        ),
        subscribe=(
            _inbox(name),
            subjects.worker_verb(worker, subjects.ANY_TOKEN),
            *_of_each(namespaces, lambda each: (subjects.dispatch_any(each), subjects.watch_any(each))),
            *_announced(),
        ),
    )


def _keeps_tasks(namespace: str) -> tuple[str, ...]:
    """What a worker writes of the tasks that it runs, and reads for them."""
    jobs, registry = buckets.jobs_bucket(namespace), buckets.endpoints_bucket(namespace)
    streams = (
        buckets.bucket_stream(jobs),
        buckets.bucket_stream(registry),
        buckets.logs_stream(namespace),
        buckets.results_stream(namespace),
        buckets.secrets_stream(namespace),
        *(buckets.objects_stream(kind.name, namespace) for kind in _READ),
    )
    return (
        # Of tasks; those of jobs have one token.
        buckets.bucket_key(jobs, f"{subjects.ANY_TOKEN}.{subjects.ANY_TOKEN}"),
        buckets.bucket_key(registry),
        subjects.jobs_submit(namespace),  # of what an operator has it run now
        subjects.ensure_namespace(namespace),  # to learn how large objects may be
        subjects.logs_of_all(namespace),
        subjects.results_of_all(namespace),
        subjects.watch_progress(namespace),
        subjects.inboxes_of(namespace),  # of its clients, and of operators who ask there
        *(subjects.objects_of_all(kind.name, namespace) for kind in _WRITTEN),
        *(subject for stream in streams for subject in _with_below(server_subjects.direct_get(stream))),
    )


def _speaks_for(namespace: str) -> tuple[str, ...]:
    """What a gateway sends for users of a namespace: it submits, asks and reads, and neither calls actors nor answers requests."""
    streams = (
        buckets.bucket_stream(buckets.endpoints_bucket(namespace)),
        buckets.logs_stream(namespace),
        buckets.events_stream(namespace),
        *(buckets.objects_stream(kind.name, namespace) for kind in _READ),
        buckets.results_stream(namespace),
    )
    return (
        subjects.jobs_submit(namespace),
        *(subjects.jobs_verb(namespace, verb) for verb in subjects.JOB_VERBS),
        subjects.ensure_namespace(namespace),
        *(subjects.endpoints_verb(namespace, verb) for verb in ("lookup", "list")),
        subjects.workers_list(namespace),
        subjects.secrets(namespace),  # to be written; what is there only services read
        *(subjects.objects_of_all(kind.name, namespace) for kind in _WRITTEN),
        *(subject for stream in streams for subject in _with_below(server_subjects.direct_get(stream))),
    )


def _autoscaler(name: str) -> Permissions:
    """It sees the workers, and has them drained; of jobs it sees nothing."""
    workers = buckets.bucket_stream(buckets.WORKERS_BUCKET)
    return Permissions(
        publish=(
            *_with_below(server_subjects.direct_get(workers)),
            subjects.workers_list(subjects.ANY_TOKEN),
            subjects.worker_verb(subjects.ANY_TOKEN, "drain"),
            subjects.vm_trouble(),
            _inbox(name),
        ),
        subscribe=(_inbox(name), subjects.watch_workers()),
    )


def _announced() -> tuple[str, ...]:
    """Where those that serve something are asked."""
    return tuple(
        verb for name in server_subjects.SERVICE_VERBS for verb in _with_below(server_subjects.service_verb(name))
    )


def _hears(namespace: str) -> tuple[str, ...]:
    return subjects.watch_any(namespace), subjects.actors_of(namespace)


def _serves(namespace: str) -> tuple[str, ...]:
    return buckets.bucket_key(buckets.endpoints_bucket(namespace)), *_serves_durably(namespace)


def _asks(namespace: str) -> tuple[str, ...]:
    """What clients and jobs of a namespace may both send: requests, calls, replies, and reads that need no consumer."""
    registry = buckets.bucket_stream(buckets.endpoints_bucket(namespace))
    seats = buckets.bucket_stream(buckets.actors_bucket(namespace))
    streams = (
        registry,
        buckets.logs_stream(namespace),
        buckets.events_stream(namespace),
        *(buckets.objects_stream(kind.name, namespace) for kind in _READ),
        buckets.results_stream(namespace),
    )
    return (
        subjects.jobs_verb(namespace, subjects.ANY_TOKEN),
        subjects.ensure_namespace(namespace),
        subjects.endpoints_verb(namespace, subjects.ANY_TOKEN),
        subjects.workers_list(namespace),
        subjects.actors_of(namespace),
        subjects.durable_calls_of_all(namespace),
        f"{server_subjects.direct_get(seats)}.{buckets.bucket_key(buckets.actors_bucket(namespace), buckets.seat_key_of_any())}",
        subjects.secrets(namespace),  # to be written; what is there only services read
        *(subjects.objects_of_all(kind.name, namespace) for kind in _WRITTEN),
        *(subject for stream in streams for subject in _with_below(server_subjects.direct_get(stream))),
        # Never those of the cluster's own: a forged reply there could pass for a service's word.
        subjects.inboxes_of(namespace),
        *subjects.PLAIN_INBOXES,
    )


def _serves_durably(namespace: str) -> tuple[str, ...]:
    """What jobs need for actors with one instance, and for those whose calls are stored."""
    bucket = buckets.actors_bucket(namespace)
    streams = (buckets.bucket_stream(bucket), buckets.calls_stream(namespace))
    return (
        buckets.bucket_key(bucket),
        *(subject for stream in streams for subject in _with_below(server_subjects.direct_get(stream))),
        subjects.trim_calls(namespace),
    )


def _with_below(subject: str) -> tuple[str, str]:
    return subject, subjects.below(subject)


@dataclass(frozen=True)
class Export:
    """Subjects of one account that others may use: a service takes requests, a stream (`is_stream`) sends messages."""

    subject: str
    is_stream: bool = False
    many_answers: bool = False  # of a service: one request may have several


# What the account of the streams gives to the account of the users, and nothing besides.
STORE_EXPORTS = (
    # The server keeps a note of each such request for two minutes, since it cannot know which answer is the last.
    *(Export(subject, many_answers=True) for subject in server_subjects.JETSTREAM_READS),
    *(
        Export(subject)
        for subject in (
            *server_subjects.JETSTREAM_ASKS,
            server_subjects.JETSTREAM_ACKS,
            server_subjects.JETSTREAM_FLOW,
            server_subjects.ALL_BUCKETS,
            server_subjects.ALL_OBJECTS,
            *subjects.STREAM_INPUTS,
        )
    ),
    # Those who may make consumers have them deliver to their inboxes, in the account of the streams.
    *(
        Export(subject, is_stream=True)
        for subject in (subjects.STREAM_OUTPUT, server_subjects.JETSTREAM_EVENTS, subjects.ALL_INBOXES)
    ),
)

# Archives of which streams are made. Not as requests: a server adds a header to those of another account, and takes it for a
# part of the archive. What is sent here names a reply subject that the account of the streams itself would write to: only
# operators may.
STORE_IMPORTS = (Export(server_subjects.JETSTREAM_RESTORES, is_stream=True),)
