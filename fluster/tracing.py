"""Traces of OpenTelemetry through calls and jobs: spans where a program traces, else the cost of a look-up.

Only a program that has imported OpenTelemetry's API can be tracing, so nothing here imports it before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import concurrent.futures

    from opentelemetry.trace import Span

Carrier = Mapping[str, str]  # a trace's context as it travels: {"traceparent": …}

HEADERS = ("traceparent", "tracestate", "baggage")  # of messages in JSON
VARIABLES = {"traceparent": "TRACEPARENT", "tracestate": "TRACESTATE", "baggage": "BAGGAGE"}  # of a job's environment
_API = "opentelemetry.trace"
_TRACER = "fluster"


def _is_recording() -> bool:
    if _API not in sys.modules:
        return False
    from opentelemetry import trace

    return trace.get_current_span().is_recording()


def _injected() -> dict[str, str]:
    from opentelemetry import propagate

    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return {name: carrier[name] for name in HEADERS if name in carrier}


def _attributes(actor: str, method: str) -> dict[str, str]:
    return {
        "rpc.system": "fluster",
        "rpc.service": actor,
        "rpc.method": method,
        "messaging.system": "nats",
        "messaging.operation.type": "send",
    }


def begin_call(actor: str, method: str) -> tuple[Span, Carrier] | None:
    """A client's span for a call, and what tells the actor of it; None when the caller is not tracing."""
    if _API not in sys.modules or not _is_recording():
        return None
    from opentelemetry import trace

    attributes = _attributes(actor, method)
    span = trace.get_tracer(_TRACER).start_span(f"{actor}/{method}", kind=trace.SpanKind.CLIENT, attributes=attributes)
    with trace.use_span(span, end_on_exit=False):
        return span, _injected()


def end_with(span: Span, future: concurrent.futures.Future[object]) -> None:
    """End a client's span when its call is over."""
    future.add_done_callback(lambda done: _end_call(span, done))


def _end_call(span: Span, done: concurrent.futures.Future[object]) -> None:
    from concurrent.futures import Future

    # By the base class, which does not read what the actor raised: its classes may be slow to import.
    error = None if done.cancelled() else Future[object].exception(done, 0)
    if done.cancelled():
        span.set_attribute("fluster.cancelled", True)
    elif error is not None:
        _set_error(span, type(error).__name__.lstrip("_"), str(error))
    span.end()


def _set_error(span: Span, kind: str, text: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, text))


def announce(actor: str, method: str) -> Carrier | None:
    """What tells all members of a pool of the span of a broadcast; None when the caller is not tracing."""
    begun = begin_call(actor, method)
    if begun is None:
        return None
    span, carrier = begun
    span.set_attribute("fluster.broadcast", True)
    span.end()  # with the sending: who answers, and when, is shown by their own spans
    return carrier


@contextlib.contextmanager
def serving(actor: str, method: str, carrier: Carrier) -> Generator[ServedSpan | None]:
    """Make a caller's trace the current one, with a span of the actor's; end that by the `ServedSpan`.

    None when this process does not trace.
    """
    if _API not in sys.modules:
        yield None
        return
    from opentelemetry import context, propagate, trace

    parent = propagate.extract(dict(carrier))
    attributes = {**_attributes(actor, method), "messaging.operation.type": "process"}
    span = trace.get_tracer(_TRACER).start_span(
        f"{actor}/{method}", context=parent, kind=trace.SpanKind.SERVER, attributes=attributes
    )
    token = context.attach(trace.set_span_in_context(span, parent))
    try:
        yield ServedSpan(span)
    finally:
        context.detach(token)


class ServedSpan:
    """The span of a call at its actor."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, error: BaseException | None) -> None:
        if error is not None and self._span.is_recording():
            self._span.record_exception(error)
            _set_error(self._span, type(error).__qualname__, str(error))
        self._span.end()


def job_environment() -> dict[str, str]:
    """Variables by which a job that is launched now continues the current trace, if there is one."""
    if not _is_recording():
        return {}
    return {VARIABLES[name]: value for name, value in _injected().items()}


def continue_trace() -> None:
    """Make the trace that this process's environment names the current one, where OpenTelemetry is installed."""
    carrier = {name: os.environ[variable] for name, variable in VARIABLES.items() if variable in os.environ}
    if "traceparent" in carrier and importlib.util.find_spec("opentelemetry") is not None:
        from opentelemetry import context, propagate

        context.attach(propagate.extract(carrier))
