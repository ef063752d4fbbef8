"""What the streams and buckets of a cluster and of a namespace are: who may write there how much, and what is dropped or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from nats.js.api import (
    DiscardPolicy,
    RePublish,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from fluster_bus.core import buckets, subjects
from fluster_bus.core.stream_bounds import (
    BUNDLES,
    CALLS_KEPT_S,
    CONTROLLERS_BYTES,
    HISTORY_KEPT_S,
    JOINS_BYTES,
    MAX_CALL_BYTES,
    MAX_CALLS_OF_ACTOR,
    MAX_SECRETS,
    MAX_SUBMISSION_BYTES,
    NAMESPACES_BYTES,
    PAYLOADS,
    REQUESTS,
    RESULTS_KEPT_S,
    SECRETS_KEPT_S,
    SUBMITTED_BYTES,
    WORKERS_BYTES,
    NamespaceBounds,
    ObjectKind,
    submissions_of,
)
from fluster_bus.storage.objects import CHUNK_BYTES, MAX_MESSAGES
from fluster_bus.storage.stored_messages import MAX_SECRETS_BYTES, RESULT_CHUNK_BYTES

PER_SUBJECT = "max_msgs_per_subject"
_DUPLICATES_S = 120  # how long the server remembers a Nats-Msg-Id


class WantedStream(NamedTuple):
    """A stream as it is to be; `given` are the fields that one that is there takes as well."""

    config: StreamConfig
    given: Mapping[str, float | None]
    is_sized: bool = False  # by a setting of its own, so that it may drop what it has


def _bucket(bucket: str, watch: str, max_bytes: int, keys: str = subjects.ANY_TAIL) -> StreamConfig:
    return StreamConfig(
        name=buckets.bucket_stream(bucket),
        subjects=[buckets.bucket_key(bucket)],
        max_bytes=max_bytes,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        storage=StorageType.FILE,
        allow_direct=True,
        # A roll-up by one who may write a single key would wipe all others: closed, with the purge that does the same.
        allow_rollup_hdrs=False,
        deny_purge=True,
        allow_atomic=True,
        duplicate_window=_DUPLICATES_S,
        republish=RePublish(src=buckets.bucket_key(bucket, keys), dest=watch),
    )


def _durable_calls(namespace: str, max_bytes: int, bounds: NamespaceBounds) -> StreamConfig:
    """Calls to durable actors, until they are handled."""
    return StreamConfig(
        name=buckets.calls_stream(namespace),
        subjects=[subjects.durable_calls_of_all(namespace)],
        max_age=bounds.calls_kept_s or CALLS_KEPT_S,
        max_bytes=max_bytes,
        max_msg_size=bounds.max_call_bytes or MAX_CALL_BYTES,
        max_msgs_per_subject=bounds.max_calls_of_actor or MAX_CALLS_OF_ACTOR,
        # Where there is no room a call is refused: what was taken is never dropped for another.
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        duplicate_window=_DUPLICATES_S,
        # They wake the serving actor; what they carry is not for all that may watch.
        republish=RePublish(
            src=subjects.durable_calls_of_all(namespace), dest=subjects.watch_calls(namespace), headers_only=True
        ),
    )


def _history(stream: str, subject: str, watch: str, max_bytes: int, kept_s: float | None) -> StreamConfig:
    return StreamConfig(
        name=stream,
        subjects=[subject],
        max_age=kept_s or HISTORY_KEPT_S,
        max_bytes=max_bytes,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        allow_direct=True,
        deny_delete=True,
        deny_purge=True,
        duplicate_window=_DUPLICATES_S,
        republish=RePublish(src=subject, dest=watch),
    )


def _chunks(
    stream: str,
    subject: str,
    *,
    chunk_bytes: int,
    kept_s: float,
    discard: DiscardPolicy = DiscardPolicy.OLD,
    **more: Any,
) -> StreamConfig:
    """Large things in pieces, each with a subject of its own."""
    return StreamConfig(
        name=stream,
        subjects=[subject],
        max_age=kept_s,
        max_msg_size=chunk_bytes,
        max_msgs_per_subject=1,
        discard=discard,
        storage=StorageType.FILE,
        allow_direct=True,
        allow_rollup_hdrs=False,
        deny_delete=True,
        **more,
    )


_MAX_REQUESTS = 16_384  # of a namespace, of one chunk each; it is their size that bounds them


def _objects(kind: ObjectKind, namespace: str, max_bytes: int, kept_s: float | None) -> StreamConfig:
    return _chunks(
        buckets.objects_stream(kind.name, namespace),
        subjects.objects_of_all(kind.name, namespace),
        chunk_bytes=CHUNK_BYTES,
        kept_s=kept_s or kind.kept_s,
        max_bytes=max_bytes,
        max_msgs=MAX_MESSAGES,
        deny_purge=True,
    )


def _requests(namespace: str, max_bytes: int, kept_s: float | None) -> StreamConfig:
    return _chunks(
        buckets.objects_stream(REQUESTS.name, namespace),
        subjects.objects_of_all(REQUESTS.name, namespace),
        chunk_bytes=CHUNK_BYTES,
        kept_s=kept_s or REQUESTS.kept_s,
        discard=DiscardPolicy.NEW,  # a job that is not recorded yet needs its own
        max_bytes=max_bytes,
        max_msgs=_MAX_REQUESTS * 2,
        # Purging is allowed: each goes when its job is recorded.
    )


def _results(namespace: str, max_bytes: int, kept_s: float | None) -> StreamConfig:
    return _chunks(
        buckets.results_stream(namespace),
        subjects.results_of_all(namespace),
        chunk_bytes=RESULT_CHUNK_BYTES,
        kept_s=kept_s or RESULTS_KEPT_S,
        max_bytes=max_bytes,
        # Purging is allowed: those of a job go with its records.
    )


def _secrets(namespace: str, max_bytes: int, bounds: NamespaceBounds) -> StreamConfig:
    return _chunks(
        buckets.secrets_stream(namespace),
        subjects.secrets(namespace),
        chunk_bytes=MAX_SECRETS_BYTES,
        kept_s=bounds.secrets_kept_s or SECRETS_KEPT_S,
        discard=DiscardPolicy.NEW,  # a job that waits still needs its own
        max_bytes=max_bytes,
        max_msgs=bounds.max_secrets or MAX_SECRETS,
        # Purging is allowed: those of a job go with it.
    )


def submit_stream(namespaces: int) -> WantedStream:
    """The queue of submissions in a cluster with so many namespaces."""
    bounds = {
        PER_SUBJECT: submissions_of(namespaces),  # each namespace has one subject
        "max_msg_size": MAX_SUBMISSION_BYTES,
        "discard_new_per_subject": True,
    }
    config = StreamConfig(
        name=buckets.SUBMIT_STREAM,
        subjects=[subjects.jobs_submit(subjects.ANY_TOKEN)],
        retention=RetentionPolicy.WORK_QUEUE,
        max_bytes=SUBMITTED_BYTES,
        discard=DiscardPolicy.NEW,  # a full queue refuses a submit, it never drops one
        storage=StorageType.FILE,
        duplicate_window=_DUPLICATES_S,
        **bounds,  # type: ignore[arg-type]
    )
    return WantedStream(config, bounds)


def system_streams() -> list[WantedStream]:
    """Those that the whole cluster needs."""
    # As many as may wait of a namespace is set when it is known how many there are.
    submitted = submit_stream(1).config
    tables = (
        _bucket(buckets.WORKERS_BUCKET, subjects.watch_workers(), WORKERS_BYTES),
        _bucket(buckets.CONTROLLERS_BUCKET, subjects.watch_controllers(), CONTROLLERS_BYTES),
        _bucket(buckets.JOINS_BUCKET, subjects.watch_joins(), JOINS_BYTES),
        _bucket(buckets.NAMESPACES_BUCKET, subjects.watch_namespaces(), NAMESPACES_BYTES),
    )
    return [WantedStream(config, {}) for config in (submitted, *tables)]


def namespace_streams(namespace: str, sizes: Mapping[str, int], bounds: NamespaceBounds) -> list[WantedStream]:
    """Those of a namespace whose shares have these sizes."""
    history = {"max_age": bounds.history_kept_s}
    seats = buckets.seat_key_of_any()  # which actor serves is for all to watch, what was saved is not
    watch_seats = subjects.watch_actors(namespace, seats)
    configs: dict[str, tuple[StreamConfig, Mapping[str, float | None]]] = {
        "jobs": (_bucket(buckets.jobs_bucket(namespace), subjects.watch_jobs(namespace), sizes["jobs"]), {}),
        "registry": (
            _bucket(buckets.endpoints_bucket(namespace), subjects.watch_endpoints(namespace), sizes["registry"]),
            {},
        ),
        "actors": (_bucket(buckets.actors_bucket(namespace), watch_seats, sizes["actors"], seats), {}),
        "calls": (
            _durable_calls(namespace, sizes["calls"], bounds),
            {
                "max_age": bounds.calls_kept_s,
                "max_msg_size": bounds.max_call_bytes,
                PER_SUBJECT: bounds.max_calls_of_actor,
            },
        ),
        "secrets": (
            _secrets(namespace, sizes["secrets"], bounds),
            {"max_msgs": bounds.max_secrets, "max_age": bounds.secrets_kept_s},
        ),
        BUNDLES.name: (
            _objects(BUNDLES, namespace, sizes[BUNDLES.name], bounds.workspaces_kept_s),
            {"max_age": bounds.workspaces_kept_s},
        ),
        PAYLOADS.name: (
            _objects(PAYLOADS, namespace, sizes[PAYLOADS.name], bounds.payloads_kept_s),
            {"max_age": bounds.payloads_kept_s},
        ),
        REQUESTS.name: (
            _requests(namespace, sizes[REQUESTS.name], bounds.requests_kept_s),
            {"max_age": bounds.requests_kept_s},
        ),
        "results": (
            _results(namespace, sizes["results"], bounds.results_kept_s),
            {"max_age": bounds.results_kept_s},
        ),
        "logs": (
            _history(
                buckets.logs_stream(namespace),
                subjects.logs_of_all(namespace),
                subjects.watch_logs(namespace),
                sizes["logs"],
                bounds.history_kept_s,
            ),
            history,
        ),
        "events": (
            _history(
                buckets.events_stream(namespace),
                subjects.events_of_all(namespace),
                subjects.watch_events(namespace),
                sizes["events"],
                bounds.history_kept_s,
            ),
            history,
        ),
    }
    return [WantedStream(config, given, share in bounds.given) for share, (config, given) in configs.items()]
