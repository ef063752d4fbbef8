"""An actor in this process: takes calls from its mailbox and runs them, one at a time unless it says otherwise."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from types import CoroutineType
from typing import Any, cast

from fluster.actors.definition.context import ActorContext, Cancellation
from fluster.actors.definition.definition import MethodInfo, methods_of, options_of
from fluster.actors.definition.json_methods import JsonMethod
from fluster.actors.definition.timers import Timer, timers_of
from fluster.actors.protocol import frames, json_frames
from fluster.actors.protocol.calls import OwnThread
from fluster.actors.protocol.clock import SYSTEM_CLOCK, Clock
from fluster.actors.protocol.failures import FULL, RETRY
from fluster.actors.protocol.flow_control import Window
from fluster.actors.protocol.frames import JSON
from fluster.actors.results.loop_calls import StoredPayloads
from fluster.actors.server.actor_lane import ActorLane
from fluster.actors.server.durable import DurableActor
from fluster.actors.server.mailbox import ConcurrencyGroup, Mailbox
from fluster.actors.server.outbox import ReplySink
from fluster.actors.server.producer import Items, Producer
from fluster.actors.server.replies import ActorCall, Replies
from fluster.actors.server.seats import Seat
from fluster.actors.server.streams import Streams
from fluster.actors.server.supervision import Functions, Supervisor, outcome_of
from fluster.cluster.refs import Ref, resolved
from fluster.errors import ActorTimeoutError, MailboxFullError, NotRunError
from fluster.log_context import LogContext, RunningCall, set_running
from fluster.tracing import serving
from fluster_bus.connection.services_api import EndpointCounts
from fluster_bus.core import codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.names import near
from fluster_bus.payloads import payloads

log = logging.getLogger(__name__)

_NO_ARGUMENTS = codec.encode(((), {}))
_FRAME_OVERHEAD = 4096  # of a reply around its payload, amply


_Group = ConcurrencyGroup[ActorCall | Producer]


class HostedActor:
    """An instance of a user's class and the threads that run its methods.

    `actor_loop` gives the event loop for asynchronous methods; it is asked when there are any. `accept` is called on
    the connection's loop; user code never runs there.
    """

    def __init__(
        self,
        instance: object,
        context: ActorContext,
        *,
        outbox: ReplySink,
        max_reply: int,
        stored: StoredPayloads,
        actor_loop: Callable[[], asyncio.AbstractEventLoop],
        factory: Callable[[], object] | None = None,
        initializer: Callable[[], object] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        seat: Seat | None = None,
        durable: DurableActor | None = None,
    ) -> None:
        self.context = context
        self.seat = seat
        self.durable = durable
        self.methods: Mapping[str, MethodInfo] = methods_of(type(instance))
        self._initializer = initializer
        self._clock = clock
        cls = type(instance)
        self.timers = [Timer(cls, name, put=self._put_run, clock=clock) for name in timers_of(cls)]
        # Of all that runs, of which callers reach the methods only.
        self._infos = {**self.methods, **{timer.key: timer.info for timer in self.timers}}
        self.counts: dict[str, EndpointCounts] = {name: EndpointCounts() for name in self.methods}
        self.counts |= {timer.key: timer.counts for timer in self.timers}
        self._options = options_of(type(instance))
        self.takes_json_only = self._options.codec == JSON
        max_reply -= _FRAME_OVERHEAD
        self._replies = Replies(context, self.methods, self.counts, outbox=outbox, max_json=max_reply)
        self._stored = stored
        self.kind = type(instance).__name__
        self.supervisor = Supervisor(
            instance, str(context.actor_name), self._options, factory=factory, actor_loop=actor_loop
        )
        self.streams = Streams(context, outbox=outbox, max_item=max_reply, store=stored.store, actor_loop=actor_loop)
        self._cancellable = {
            name
            for name, method in self.methods.items()
            if method.is_async or method.takes_context or method.window is not None
        }
        # {(reply subject, index): of a call that is here}
        self._cancellations: dict[tuple[str, int], Cancellation] = {}
        self._notices = {frames.CANCEL: self._on_cancel, frames.READ: self.streams.on_read}
        self._actor_loop = actor_loop
        self._groups: dict[str | None, _Group] = {None: self._make_group(None, self._options.max_concurrency)}
        for group_name, at_once in self._options.concurrency_groups.items():
            self._groups[group_name] = self._make_group(group_name, at_once)
        # {method: where it runs}
        self._group_of = {name: self._groups[method.concurrency_group] for name, method in self.methods.items()}
        self._group_of[frames.PING] = self._groups[None]

    def _make_group(self, group: str | None, at_once: int) -> _Group:
        kinds = {method.is_async for method in self._infos.values() if method.concurrency_group == group}
        names = frozenset(name for name, method in self.methods.items() if method.concurrency_group == group)
        own_thread = OwnThread(
            str(self.context.endpoint_id), str(self.context.actor_name), names if at_once == 1 else frozenset()
        )

        def begin() -> None:
            own_thread.enter()
            if self._initializer is not None:
                self._initializer()

        return ConcurrencyGroup(
            f"{self.context.actor_name}-{group}" if group else str(self.context.actor_name),
            Mailbox(max_items=self._options.mailbox_calls, max_bytes=self._options.mailbox_bytes),
            self._handle,
            at_once=at_once,
            has_sync=False in kinds,
            has_async=True in kinds,
            begin=begin,
        )

    @property
    def has_one_thread(self) -> bool:
        """True when one thread alone takes calls off a connection, and answers one before it takes the next."""
        return self.durable is None and len(self._groups) == 1 and self._groups[None].has_one_thread

    def attach_lane(self, lane: ActorLane) -> None:
        """Have that one thread read `lane`, and answer over it. To be said before `start`."""
        self._replies.outbox = self.streams.outbox = lane.outbox
        self._groups[None].mailbox.wait_in(lane.queue)

    def start(self) -> None:
        """Begin to run what is accepted, and what is to be run again and again. Called on the connection's loop."""
        for group in self._groups.values():
            group.start()
        for timer in self.timers:
            timer.start()

    # ---- on the connection's loop -----------------------------------------------------------------------

    def accept(self, delivery: Delivery) -> None:
        """Take the calls of a message into the mailbox; those that cannot be are answered at once."""
        _subject, data, reply, _headers = delivery
        if reply and not subjects.is_inbox(reply):
            log.warning("refused a call to %s: its reply subject %s is not an inbox", delivery.subject, reply)
            return
        if self.takes_json_only or data[:1] != codec.PICKLE:
            self._accept_json(delivery)
            return
        try:
            calls = frames.decode_calls(data)
        except InvalidMessageError as error:
            self._replies.send_failure(ActorCall(reply, 0, "", None, b""), error)
            return
        for index, (method, deadline, payload, *trace) in enumerate(calls):
            held = payload if payload[:1] == codec.PICKLE else payloads.held(payload)
            self._admit(ActorCall(reply, index, method, deadline, held, False, None, trace[0] if trace else None))

    def accept_unstored(self, delivery: Delivery) -> None:
        """For a durable actor: take no calls but pings of a message that did not come out of its stream."""
        if subjects.last_token(delivery.subject) == frames.PING:
            self.accept(delivery)
            return
        if subjects.last_token(delivery.subject) in frames.NOTICES or not subjects.is_inbox(delivery.reply):
            return
        is_json = not codec.is_pickle(delivery.data)
        error: Exception = TypeError(
            f"{self.context.actor_name} is durable: its calls are stored first, not sent to it directly or broadcast: "
            f"call it from Python, ActorPool(cluster, {str(self.context.actor_name)!r}).call()"
        )
        try:
            count = 1 if is_json else len(frames.decode_calls(delivery.data))
        except InvalidMessageError as unreadable:
            error, count = unreadable, 1
        for index in range(count):
            self._replies.send_failure(ActorCall(delivery.reply, index, "", None, b"", is_json=is_json), error)

    def _accept_json(self, delivery: Delivery) -> None:
        method = subjects.last_token(delivery.subject)
        call = ActorCall(
            delivery.reply, 0, method, None, delivery.data, is_json=True, trace=json_frames.trace_of(delivery)
        )
        try:
            if codec.is_pickle(delivery.data):
                raise InvalidMessageError(f"{self.context.actor_name} takes JSON only: nothing here is unpickled")
            self._admit(dataclasses.replace(call, deadline=json_frames.deadline_of(delivery)))
        except InvalidMessageError as error:
            self._replies.send_failure(call, error)

    def _admit(self, call: ActorCall) -> None:
        if call.method in self._cancellable:
            call = self._made_cancellable(call)
        if self.supervisor.given_up is not None:
            self._reject(call, self.supervisor.given_up, RETRY)
        elif (group := self._group_of.get(call.method)) is None:
            if call.method in self._notices:
                self._on_notice(call)
                return
            self._replies.send_failure(
                call, AttributeError(f"{self.kind} has no method {call.method!r}{near(call.method, self.methods)}")
            )
        elif not (box := group.mailbox).put(call, len(call.payload), (call.reply, call.index) if call.reply else None):
            text = (
                f"{self.context.actor_name} has {len(box):,} calls waiting: "
                "send less at a time, or add members to its pool"
            )
            self._reject(call, MailboxFullError(text), FULL)

    def _reject(self, call: ActorCall, error: Exception, advice: str) -> None:
        """Tell the caller that its call was not run; one that is stored is left as it is."""
        self._forget(call)
        if self.durable is None or not self.durable.on_not_run(call.reply):
            self._replies.send_failure(call, error, advice=advice)

    def _made_cancellable(self, call: ActorCall) -> ActorCall:
        cancellation = Cancellation()
        if call.reply:  # else it has no name by which it could be cancelled
            self._cancellations[call.reply, call.index] = cancellation
        return dataclasses.replace(call, cancellation=cancellation)

    def _on_notice(self, message: ActorCall) -> None:
        try:
            self._notices[message.method](message.reply, message.payload)
        except InvalidMessageError as error:
            log.warning("a notice to %s was dropped: %s", self.context.actor_name, error)
            self._replies.send_failure(message, error)

    def _on_cancel(self, reply: str, payload: bytes) -> None:
        for key in frames.cancelled_calls(reply, payload):
            if not any(self._remove(group.mailbox, key) for group in self._groups.values()):
                cancellation = self._cancellations.get(key)
                if cancellation is not None:
                    cancellation.cancel()

    def _remove(self, mailbox: Mailbox[ActorCall | Producer], key: tuple[str, int]) -> bool:
        """Take a call that waits out of its mailbox."""
        call = mailbox.remove(key)
        if not isinstance(call, ActorCall):
            return False
        self._forget(call)
        self._replies.send_cancelled(call)
        mailbox.done(len(call.payload))
        return True

    def _put_run(self, timer: Timer) -> bool:
        if self.supervisor.given_up is not None:
            return False
        call = ActorCall("", 0, timer.key, None, _NO_ARGUMENTS, timer=timer)
        return self._groups[timer.info.concurrency_group].mailbox.put(call, len(_NO_ARGUMENTS))

    async def drain(self, timeout_s: float) -> None:
        """Finish what is in the mailbox, then end the threads. After `timeout_s` what waits is answered with the error that it was not run."""
        for timer in self.timers:
            timer.stop()
        try:
            async with asyncio.timeout(timeout_s):
                for group in self._groups.values():
                    await group.wait_idle()
        except TimeoutError:
            log.warning("%s was still busy after %g s", self.context.actor_name, timeout_s)
        error = self.supervisor.given_up or NotRunError(
            f"{self.context.actor_name} was shut down; the call was not run"
        )
        for call in [call for group in self._groups.values() for call in group.close()]:
            if isinstance(call, Producer):
                continue  # it runs, and is left without an answer as others that do
            if call.timer is not None:
                call.timer.on_done()
            else:
                self._reject(call, error, RETRY)

    def wait_timers(self, timeout_s: float) -> None:
        """Return when no run of a timer waits or is under way. Raises TimeoutError."""
        for timer in self.timers:
            if not timer.idle.wait(timeout_s):
                raise TimeoutError(f"{self.context.actor_name}.{timer.key} has not ended after {timeout_s:g} s")

    # ---- on the actor's threads -------------------------------------------------------------------------

    def _handle(self, call: ActorCall | Producer, group: _Group) -> None:
        """Run it, seen by those who watch."""
        if isinstance(call, Producer):
            self._go_on(call, group)
            return
        if LogContext.in_use:
            set_running(RunningCall(str(self.context.actor_name), call.method, call.reply, call.index))
        if call.trace is None:
            self._run(call, group)
        else:
            with serving(str(self.context.actor_name), call.method, call.trace) as span:
                self._run(dataclasses.replace(call, span=span), group)

    def _go_on(self, producer: Producer, group: _Group) -> None:
        if LogContext.in_use:
            set_running(RunningCall(str(self.context.actor_name), producer.method, producer.subject, producer.index))
        if (replacing := self.supervisor.replacing) is not None:
            replacing.wait()
        self.streams.run_burst(producer, group)

    def _run(self, call: ActorCall, group: _Group) -> None:
        started_ns = time.perf_counter_ns()
        supervisor = self.supervisor
        if (replacing := supervisor.replacing) is not None:
            replacing.wait()
        refusal = supervisor.given_up or (self.seat.fence() if self.seat is not None else None)
        if refusal is not None:
            self._reject(call, refusal, RETRY)
            self._leave(call, group, refusal)
            return
        functions = supervisor.functions
        try:
            if call.deadline is not None and frames.seconds_between(call.deadline, self._clock.now()) >= 0:
                raise ActorTimeoutError(f"{self.context.actor_name}.{call.method} arrived too late; it was not run")
            payload = call.payload
            # Most have them with them.
            args, kwargs = pickle.loads(payload) if payload[:1] == codec.PICKLE else self._arguments(call)
            if Ref.in_use:
                args, kwargs = resolved(args, kwargs, self.context.cluster)
            info = self._infos.get(call.method)
            if info is not None and info.takes_context:
                args = (self._context_of(call), *args)
            result = functions[call.method](*args, **kwargs) if info is not None else True  # a ping
        except BaseException as error:
            self._finish_failed(call, group, started_ns, functions, error)
            return
        if info is not None and info.window is not None and isinstance(result, Generator | AsyncGenerator):
            self._open_stream(call, group, info.window, cast("Items", result), functions)
            return
        if not isinstance(result, CoroutineType):
            self._finish(call, group, started_ns, result, None)
            return
        outcome = outcome_of(cast("Any", result), call.cancellation)
        running = asyncio.run_coroutine_threadsafe(outcome, self._actor_loop())

        def finish(value: object, error: BaseException | None) -> None:
            if error is None:
                self._finish(call, group, started_ns, value, None)
            else:
                self._finish_failed(call, group, started_ns, functions, error)

        if group.frees_its_thread:
            running.add_done_callback(lambda done: finish(*done.result()))
        else:
            finish(*running.result())

    def _finish_failed(
        self, call: ActorCall, group: _Group, started_ns: int, functions: Functions, error: BaseException
    ) -> None:
        replace_instance = self.supervisor.on_error(functions, error)
        self._finish(call, group, started_ns, None, error)
        if replace_instance is not None:
            replace_instance()

    def _open_stream(self, call: ActorCall, group: _Group, window: Window, items: Items, functions: Functions) -> None:
        if call.is_json or not call.reply:
            why = (
                "an actor that takes JSON only has no streams: return a list"
                if self.takes_json_only
                else "only Fluster's own callers can read it, as they tell how far they have come"
            )
            text = f"{self.context.actor_name}.{call.method} is a generator: {why}"
            self._finish(call, group, time.perf_counter_ns(), None, TypeError(text))
            return

        def end(producer: Producer) -> None:
            started_ns = time.perf_counter_ns() - producer.processing_ns
            if producer.error is not None:
                self._finish_failed(call, group, started_ns, functions, producer.error)
            else:
                self._finish(call, group, started_ns, None, None)  # a result without content is the end

        self.streams.open(call, group, window, items, end)

    def _arguments(self, call: ActorCall) -> tuple[Sequence[Any], dict[str, Any]]:
        if not call.is_json:
            payload = call.payload
            return payloads.decode(self._stored.fetch(payload).result() if payloads.is_stored(payload) else payload)  # type: ignore[no-any-return]
        args, kwargs = codec.decode_json_call(call.payload)
        method = self._json_methods.get(call.method)
        return (args, kwargs) if method is None else method.arguments(args, kwargs)

    def describe(self, method: str) -> Mapping[str, str]:
        """The description of a method in the services API, for callers that use JSON."""
        return self._json_methods[method].metadata

    @functools.cached_property
    def _json_methods(self) -> Mapping[str, JsonMethod]:
        bound = self.supervisor.functions
        return {name: JsonMethod(bound[name], takes_context=info.takes_context) for name, info in self.methods.items()}

    def _context_of(self, call: ActorCall) -> ActorContext:
        is_stream = self._infos[call.method].window is not None  # whose deadline is only for its beginning
        deadline = None
        if call.deadline is not None and not is_stream:
            deadline = time.monotonic() + frames.seconds_between(self._clock.now(), call.deadline)
        return dataclasses.replace(
            self.context, method=call.method, deadline=deadline, _cancellation=call.cancellation, _reply=call.reply
        )

    def _finish(
        self, call: ActorCall, group: _Group, started_ns: int, result: Any, error: BaseException | None
    ) -> None:
        if self.seat is not None and self.durable is None and (superseded := self.seat.fence()) is not None:
            error = superseded  # the answer is another's to give
        counts = self.counts.get(call.method)
        if counts is not None:
            counts.requests += 1  # before an error is counted: a reader must not see more errors than requests
        cancellation = call.cancellation
        if cancellation is not None and cancellation.cancelled:
            self._replies.send_cancelled(call)
        else:
            if error is None:
                error = self._replies.send_result(call, result)
            if error is not None:
                self._replies.send_failure(call, error)
        if cancellation is not None:
            self._forget(call)
        if counts is not None:
            counts.processing_ns += time.perf_counter_ns() - started_ns
        if call.span is None and call.timer is None:  # as most
            group.done(len(call.payload))
        else:
            self._leave(call, group, error)

    def _forget(self, call: ActorCall) -> None:
        """It can no longer be cancelled."""
        self._cancellations.pop((call.reply, call.index), None)

    @staticmethod
    def _leave(call: ActorCall, group: _Group, error: BaseException | None) -> None:
        if call.span is not None:
            call.span.end(error)
        group.done(len(call.payload))
        if call.timer is not None:
            call.timer.on_done()
