"""Replies to the callers of an actor in this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from fluster.actors.definition.context import ActorContext, Cancellation
from fluster.actors.definition.definition import MethodInfo
from fluster.actors.definition.timers import Timer
from fluster.actors.protocol.failures import RETRY, encode_failure, traceback_of
from fluster.actors.server.outbox import Reply, ReplySink
from fluster.remote_errors.kindred_errors import message_of, type_name
from fluster.tracing import Carrier, ServedSpan
from fluster_bus.connection.services_api import EndpointCounts
from fluster_bus.core import codec
from fluster_bus.core.delivery import error_headers
from fluster_bus.core.errors import MessageTooLargeError
from fluster_bus.payloads import payloads

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ActorCall:
    """A call in the mailbox."""

    reply: str
    index: int  # in its message
    method: str
    deadline: tuple[str, float, float] | None
    payload: bytes
    is_json: bool = False
    timer: Timer | None = None  # whose run it is
    trace: Carrier | None = None  # that its caller is in
    span: ServedSpan | None = None
    cancellation: Cancellation | None = None  # of methods that can notice it while they run


class Replies:
    """Sends the results and failures of calls to their callers. Those that JSON carries have `max_json` bytes at most.

    `counts` learns of failures; {method: its counts}.
    """

    def __init__(
        self,
        context: ActorContext,
        methods: Mapping[str, MethodInfo],
        counts: Mapping[str, EndpointCounts],
        *,
        outbox: ReplySink,
        max_json: int,
    ) -> None:
        self.outbox = outbox
        self._actor = context.actor_name
        self._endpoint_id = str(context.endpoint_id)
        self._methods = methods
        self._counts = counts
        self._max_json = max_json  # a pickle may be stored

    def send_result(self, call: ActorCall, result: object) -> Exception | None:
        """Send the result; return what is wrong with it."""
        reply = call.reply
        if not reply:
            return None
        try:
            payload = codec.encode_json_result(result) if call.is_json else payloads.encode_for(result, reply)
        except TypeError as error:
            return error
        if not call.is_json:
            self.outbox.add(Reply(reply, self._endpoint_id, call.index, True, payload))
            return None
        if len(payload) > self._max_json:
            return MessageTooLargeError(
                f"the result of {self._actor}.{call.method} has {len(payload):,} bytes, over the "
                f"server's limit of {self._max_json:,}: return less, or the path of a file"
            )
        self.outbox.add(Reply(reply, "", call.index, True, payload))
        return None

    def send_failure(self, call: ActorCall, error: BaseException, *, advice: str = "") -> None:
        """Tell the caller, and count and log it. `advice` says whether the call may be made again."""
        counts = self._counts.get(call.method)
        if counts is not None:
            counts.errors += 1
            counts.last_error = f"{type_name(error)}: {message_of(error)}"[:200]
        if call.timer is not None:
            log.error("%s.%s failed", self._actor, call.method, exc_info=error)
            return
        if not isinstance(error, Exception):
            log.error("%s.%s raised %s", self._actor, call.method, type_name(error), exc_info=error)
        if not call.reply:
            log.warning("%s.%s failed, and no caller waits for it: %s", self._actor, call.method, message_of(error))
            return
        advice = advice or self._advice_about(call, error)
        if not call.is_json:
            self._send(call, ok=False, payload=encode_failure(error, skipped_frames=1, advice=advice))
        else:
            kind, text = type_name(error), message_of(error)
            headers = error_headers(kind, text)
            body = codec.encode_json_error(kind, text, traceback_of(error, skipped_frames=1), advice=advice)
            self.outbox.add(Reply(call.reply, "", 0, ok=False, payload=body, headers=headers))

    def _advice_about(self, call: ActorCall, error: BaseException) -> str:
        info = self._methods.get(call.method)
        return RETRY if info is not None and isinstance(error, info.retry_exceptions) else ""

    def send_cancelled(self, call: ActorCall) -> None:
        """Tell the caller that it is over: its result is not wanted."""
        if call.is_json:
            body = codec.encode_json_error("CancelledError", "the call was cancelled by its caller")
            self.outbox.add(Reply(call.reply, "", 0, ok=False, payload=body))
        else:
            self._send(call, ok=False, payload=b"")

    def _send(self, call: ActorCall, *, ok: bool, payload: bytes) -> None:
        endpoint_id = "" if call.is_json else self._endpoint_id
        self.outbox.add(Reply(call.reply, endpoint_id, call.index, ok, payload))
