"""A job continues the trace in which it was launched, and its log records know it."""

from __future__ import annotations

import io
import logging
import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from fluster import Entrypoint, JobRequest, LocalCluster, LogContext, deploy
from fluster_bus.core.names import unique_name


def where_am_i() -> tuple[str | None, int, str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LogContext())
    handler.setFormatter(logging.Formatter("%(job_id)s %(task)s %(message)s"))
    log = logging.getLogger("job")
    log.addHandler(handler)
    log.warning("hello")
    return os.environ.get("TRACEPARENT"), trace.get_current_span().get_span_context().trace_id, stream.getvalue()


def test_a_job_knows_its_trace_and_its_name(cluster: LocalCluster) -> None:
    request = JobRequest(name="traced", entrypoint=Entrypoint(callable=where_am_i))
    with TracerProvider().get_tracer("test").start_as_current_span("launching") as span:
        job_id = cluster.launch(request)
    untraced = cluster.launch(request)
    ids = span.get_span_context()
    cluster.wait([job_id, untraced], timeout=60)
    traceparent, trace_id, line = cluster.result(job_id)
    assert traceparent == f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{ids.trace_flags:02x}"
    assert trace_id == ids.trace_id
    assert line == f"{job_id} 0 hello\n"
    assert cluster.result(untraced)[:2] == (None, 0)


class Where:
    def trace_id(self) -> int:
        return trace.get_current_span().get_span_context().trace_id


def test_an_actor_of_the_cluster_joins_its_callers_trace(cluster: LocalCluster) -> None:
    pool = deploy(cluster, Where, name=unique_name("where"))
    try:
        assert pool.call().trace_id() == 0
        with TracerProvider().get_tracer("test").start_as_current_span("calling") as span:
            assert pool.call().trace_id() == span.get_span_context().trace_id
    finally:
        pool.shutdown()
