"""The actor's end of stored calls: run one after the other, each handled when that is written down.

What is kept of a durable actor are two rows. `handled` tells up to which call of the stream all are handled, with the
answer to the last, `state` what was saved, and in which call. Both are written only at the revision that this instance
wrote last; it begins by writing both, so the instance that served before can write neither, and answers nothing from then on, as the
row comes before the answer.

Which of the stored calls are to be run is decided by `CallLog`, without any I/O.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from fluster.actors.protocol import frames
from fluster.actors.protocol.failures import encode_failure
from fluster.actors.server.outbox import Outbox, Reply
from fluster.actors.server.producer import Producer
from fluster.actors.server.seats import Seat
from fluster.errors import ActorDiedError, ActorGivenUpError, SupersededError
from fluster_bus.connection.carrier import Interest, retried_when_connected, wait_to_retry
from fluster_bus.core import buckets, codec, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import (
    BusError,
    ClosedError,
    InvalidMessageError,
    MessageTooLargeError,
    RevisionConflictError,
)
from fluster_bus.messages import Done, HandledCalls, KeptAnswer, SavedState, TrimCalls
from fluster_bus.payloads import payloads
from fluster_bus.storage.feeds import Entry
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import StoredCall, calls_feed
from fluster_bus.storage.streams import handled_table, states_table

if TYPE_CHECKING:
    from fluster.actors.server.hosted import HostedActor
    from fluster_bus.connection.bus import Bus
    from fluster_bus.storage.tables import Table

log = logging.getLogger(__name__)

Record = TypeVar("Record", HandledCalls, SavedState)

MAX_STATE_BYTES = 4 << 20
_MAX_KEPT_BYTES = 256 << 10  # of an answer; a larger one is put among the objects first
_PAUSE_S, _MAX_LAG_S = 0.05, 5.0
_REPLIES = (
    f"{subjects.inbox_prefix('stored')}."  # stands for the inbox of a stored call's caller; nothing is subscribed to it
)
REMEMBERED = 64  # calls that were handled last, by whose ids those that come again are known
REMEMBERED_BYTES = 4 << 20  # of them, as they stay in the stream for the next instance


class _Running:
    """The call that the actor is at."""

    def __init__(self, call: StoredCall) -> None:
        self.sequence = call.sequence
        self.reply = f"{_REPLIES}{call.sequence}"
        # None: it was not run.
        self.answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()

    def settle(self, answer: Reply | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class DurableActor:
    """Gives an actor its stored calls, and keeps how far it is and what it saved. It takes the actor's replies.

    Lives on the loop of the cluster's connection, but for `add`, `on_not_run` and `save`.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        name: str,
        instance: str,
        *,
        outbox: Outbox,
        store: ObjectStore,
        loop: asyncio.AbstractEventLoop,
        has_hook: bool,
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._name = name
        self._instance = instance
        self._outbox = outbox
        self._store = store
        self._loop = loop
        self._has_hook = has_hook  # that takes what is saved
        self._handled = handled_table(bus, namespace)
        self._states = states_table(bus, namespace)
        self._handled_at = self._state_at = 0  # revisions that this instance wrote last
        self._state = SavedState(instance=instance)
        self._log = CallLog()
        self._unanswered: int | None = None  # the call that was saved in, but has no answer
        self._stored = 0  # the sequence of the newest call in the stream, as last announced
        self._lags_until = 0.0  # until when a replica of the stream that is asked may not have it
        self._running: _Running | None = None
        self._saving = asyncio.Lock()
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    # ---- beginning --------------------------------------------------------------------------------------

    async def take_over(self) -> None:
        """Have both rows be this instance's, and go on from where they stand."""
        self._handled_at, before = await self._own(self._handled, buckets.handled_key(self._name), HandledCalls)
        self._state_at, self._state = await self._own(self._states, buckets.state_key(self._name), SavedState)
        self._log = CallLog(max(before.sequence, self._state.sequence))
        if self._state.sequence > before.sequence:
            self._unanswered = self._state.sequence
        elif before.answer is not None and subjects.is_inbox(before.answer.subject):
            # It may not have been sent. Where it goes each job of the namespace may have written, and this process may have more rights.
            kept = before.answer
            self._outbox.add(Reply(kept.subject, self._instance, 0, kept.ok, kept.payload))

    async def _own(self, table: Table[Record], key: str, kind: type[Record]) -> tuple[int, Record]:
        while True:
            row = await table.get(key)
            if row is None:
                mine, at = kind(instance=self._instance), 0
            else:
                mine, at = row.value.model_copy(update={"instance": self._instance}), row.revision
            try:
                return (await table.update(key, mine, at) if row is not None else await table.create(key, mine)), mine
            except ClosedError:
                raise
            except BusError as error:
                # Who served before wrote at this very moment, or what was written is not known: look again.
                log.info("%s is taken over once more: %s", key, error)
                await wait_to_retry(self._bus, _PAUSE_S)

    @property
    def saved(self) -> bytes | None:
        """What was saved last, by whichever instance."""
        return self._state.data

    async def listen(self) -> Interest:
        """Be woken by what is stored, from the next flush on."""
        return await self._bus.subscribe(subjects.watch_calls(self._namespace, self._name), self._on_stored)

    def start(self, actor: HostedActor, seat: Seat) -> None:
        """Begin to run what is stored; once it listens."""
        self._bus.on_reconnect(self._wake.set)
        self._task = asyncio.create_task(self._run(actor, seat), name=f"stored calls of {self._name}")

    async def stop(self, timeout_s: float) -> None:
        """Take no more calls; return when the one that runs is handled, or after `timeout_s`: then it runs again."""
        self._closing = True
        self._wake.set()
        self._bus.off(self._wake.set)
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)
            self._task.cancel()

    # ---- running ----------------------------------------------------------------------------------------

    async def _run(self, actor: HostedActor, seat: Seat) -> None:
        start = 1  # those that were handled tell which come again
        try:
            while not self._closing and actor.supervisor.given_up is None:
                self._wake.clear()
                start = await self._read(start, actor, seat)
                if start <= self._stored and self._loop.time() < self._lags_until:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    await self._wake.wait()
        except SupersededError as error:
            actor.supervisor.end(error)
        except ClosedError:
            log.info("the connection was closed before all calls of %s were run", self._name)
        except Exception as error:
            log.exception("the stored calls of %s cannot be run", self._name)
            reason = ActorGivenUpError(f"{self._name} was given up: its stored calls cannot be run: {error}")
            actor.supervisor.end(reason)

    def _on_stored(self, delivery: Delivery) -> None:
        self._stored = Entry.of(delivery).sequence
        self._lags_until = self._loop.time() + _MAX_LAG_S
        self._wake.set()

    async def _read(self, start: int, actor: HostedActor, seat: Seat) -> int:
        """Run what is stored from `start` on; return where to go on."""
        feed = calls_feed(self._bus, self._namespace, self._name)
        try:
            async with aclosing(feed.stored(start)) as entries:
                async for entry in entries:
                    if not await self._handle(StoredCall.of(entry), actor, seat):
                        return start
                    start = entry.sequence + 1
        except ClosedError:
            raise
        except BusError as error:
            log.info("the calls of %s are read again: %s", self._name, error)
            await wait_to_retry(self._bus, _PAUSE_S)
            self._wake.set()
        return start

    async def _handle(self, call: StoredCall, actor: HostedActor, seat: Seat) -> bool:
        """Have a call be handled, unless it was before; False when it is left to the next instance."""
        if self._unanswered == call.sequence:
            self._tell_lost(call)
        if not self._log.is_new(call.sequence, call.call_id, len(call.data)):
            return True
        while not self._closing:
            await seat.wait_sure()
            answer = await self._run_call(call, actor)
            if answer is not None:
                await self._commit(call, answer)
                return True
            if actor.supervisor.given_up is not None:
                return False
            await asyncio.sleep(_PAUSE_S)  # its mailbox was full of something else
        return False

    def _tell_lost(self, call: StoredCall) -> None:
        self._unanswered = None
        if call.reply:
            error = ActorDiedError(
                f"{self._name} ended after it had saved what this call did, and before it answered: it is not run again"
            )
            self._outbox.add(Reply(call.reply, self._instance, 0, ok=False, payload=encode_failure(error)))

    async def _run_call(self, call: StoredCall, actor: HostedActor) -> Reply | None:
        running = _Running(call)
        try:
            count = len(frames.decode_calls(call.data)) if codec.is_pickle(call.data) else 0
            if count != 1:
                raise InvalidMessageError(f"a message to a durable actor is one pickled call, not {count} of them")
        except InvalidMessageError as error:
            return Reply(running.reply, self._instance, 0, ok=False, payload=encode_failure(error))
        self._running = running
        try:
            actor.accept(Delivery(subjects.durable_calls(self._namespace, self._name), call.data, running.reply))
            return await running.answer
        finally:
            self._running = None

    async def _commit(self, call: StoredCall, answer: Reply) -> None:
        """First the row, then the answer: an instance that was superseded does not answer."""
        if len(answer.payload) > _MAX_KEPT_BYTES:
            answer = await self._put_among_objects(answer)
        kept = KeptAnswer(subject=call.reply, ok=bool(answer.ok), payload=answer.payload) if call.reply else None
        handled = HandledCalls(instance=self._instance, sequence=call.sequence, answer=kept)
        self._handled_at = await self._put(self._handled, buckets.handled_key(self._name), handled, self._handled_at)
        self._log.on_handled(call.sequence, call.call_id, len(call.data))
        if call.reply:
            self._outbox.add(replace(answer, subject=call.reply))
        before = self._log.droppable()
        if before is not None:
            self._bus.spawn(self._trim(before), f"dropping handled calls of {self._name}")

    async def _put_among_objects(self, answer: Reply) -> Reply:
        try:
            return replace(answer, payload=await payloads.stored(answer.payload, self._store))
        except Exception as error:
            error.add_note(f"the result has {len(answer.payload):,} bytes: return less, or the path of a file")
            return replace(answer, ok=False, payload=encode_failure(error))

    async def _trim(self, before: int) -> None:
        request = TrimCalls(name=self._name, before=before)
        try:
            await self._bus.ask(subjects.trim_calls(self._namespace), request, Done)
        except BusError as error:
            log.info("handled calls of %s stay for now: %s", self._name, error)

    async def _put(self, table: Table[Record], key: str, value: Record, revision: int) -> int:
        """Write a row at the revision that this instance wrote last. Raises SupersededError."""
        return await retried_when_connected(
            self._bus,
            lambda: self._put_once(table, key, value, revision),
            on_error=lambda error: log.info("%s is written again: %s", key, error),
            unless=ClosedError,
            pause_s=_PAUSE_S,
        )

    async def _put_once(self, table: Table[Record], key: str, value: Record, revision: int) -> int:
        try:
            return await table.update(key, value, revision)
        except RevisionConflictError as error:
            row = await table.get(key)
            if row is not None and row.value == value:
                return row.revision  # its acknowledgement was lost
            raise SupersededError(
                f"another instance of {self._name!r} has taken this one's place: nothing was written"
            ) from error

    # ---- from the actor's threads -----------------------------------------------------------------------

    def add(self, reply: Reply | Producer) -> None:
        """Take a reply: that of the call that runs is written down first."""
        if not isinstance(reply, Reply) or not reply.subject.startswith(_REPLIES):
            self._outbox.add(reply)
        elif (running := self._running) is not None and reply.subject == running.reply:
            self._settle(running, reply)
        # Else it comes too late: that call is left to the next instance.

    def on_not_run(self, reply: str) -> bool:
        """A call was turned away; False when it is none of those that are stored."""
        if not reply.startswith(_REPLIES):
            return False
        if (running := self._running) is not None and reply == running.reply:
            self._settle(running, None)
        return True

    def _settle(self, running: _Running, answer: Reply | None) -> None:
        try:
            self._loop.call_soon_threadsafe(running.settle, answer)
        except RuntimeError:
            log.info("the connection was closed before a call to %s was handled: it is run again", self._name)

    def save(self, state: object, reply: str) -> concurrent.futures.Future[None]:
        """Store the state; what is returned ends when it is stored. `reply` names the call that saves, if one does.

        Raises TypeError, MessageTooLargeError; the future SupersededError.
        """
        if not self._has_hook:
            raise TypeError(f"{self._name} saves its state, but its class has no on_restore(state) to take it again")
        data = codec.encode(state)
        if len(data) > MAX_STATE_BYTES:
            raise MessageTooLargeError(
                f"the state of {self._name} has {len(data):,} bytes, over the limit of {MAX_STATE_BYTES:,}: save less, or "
                "the path of a file"
            )
        return asyncio.run_coroutine_threadsafe(self._save(data, reply), self._loop)

    async def _save(self, data: bytes, reply: str) -> None:
        async with self._saving:
            # Also of a call whose end is no longer waited for: what it did is in the state, so it must not be run again.
            saved_by = int(subjects.last_token(reply)) if reply.startswith(_REPLIES) else 0
            sequence = max(saved_by, self._state.sequence)
            state = SavedState(instance=self._instance, data=data, sequence=sequence)
            key = buckets.state_key(self._name)
            self._state_at = await self._put(self._states, key, state, self._state_at)
            self._state = state


class CallLog:
    """How far the calls are handled, and which of them came last.

    It sees every call that the stream still holds, in order, and so knows after a restart what it knew before:
    what is remembered is never dropped from the stream.
    """

    def __init__(self, handled: int = 0) -> None:
        self.handled = handled  # the sequence of the last call that is not to be run again
        self._sizes: OrderedDict[str, tuple[int, int]] = OrderedDict()  # {call id: (sequence, bytes)}, the oldest first
        self._bytes = 0
        self._forgotten = 0  # since `droppable` last returned some

    def is_new(self, sequence: int, call_id: str, size: int) -> bool:
        """Whether a call is to be run. One that is not counts as handled."""
        if sequence > self.handled and call_id not in self._sizes:
            return True
        self.on_handled(sequence, call_id, size)
        return False

    def on_handled(self, sequence: int, call_id: str, size: int) -> None:
        """A call was run, or has come again."""
        self.handled = max(sequence, self.handled)
        if call_id in self._sizes:
            return  # remembered from when it came first, as it will be after a restart
        self._sizes[call_id] = sequence, size
        self._bytes += size
        while len(self._sizes) > REMEMBERED or (self._bytes > REMEMBERED_BYTES and len(self._sizes) > 1):
            _id, (_sequence, forgotten) = self._sizes.popitem(last=False)
            self._bytes -= forgotten
            self._forgotten += 1

    def droppable(self) -> int | None:
        """Before which sequence calls can be dropped from the stream; None when it is not worth the while yet."""
        if self._forgotten < REMEMBERED and self._bytes < REMEMBERED_BYTES // 2:
            return None
        if self._forgotten == 0:
            return None
        self._forgotten = 0
        return next(iter(self._sizes.values()))[0]
