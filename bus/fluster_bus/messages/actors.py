"""What is kept of actors that have one instance, and of those whose calls are stored."""

from __future__ import annotations

from fluster_bus.messages.parts.model import Message


class ActorSeat(Message):
    """Whose an actor's name is, as the holder says itself. It does as long as it writes this again and again."""

    instance: str = ""  # empty: it was given back
    holder: str = ""  # the task whose attempts follow each other; empty for a process outside of any job
    who: str = ""  # for people
    is_durable: bool = False  # its calls are stored, also while nobody has the seat
    lease_s: float | None = None  # for how long it counts on each writing; None: ten seconds


class KeptAnswer(Message):
    """The answer to the call that was handled last: its actor may have ended before it was sent."""

    subject: str
    ok: bool
    payload: bytes


class HandledCalls(Message):
    """How far a durable actor has come. Only the instance that wrote it last may write it again."""

    instance: str
    sequence: int = 0  # of the last call that was handled, in the stream of calls
    answer: KeptAnswer | None = None


class SavedState(Message):
    """What a durable actor has saved, a pickle. Only the instance that wrote it last may write it again."""

    instance: str
    data: bytes | None = None  # None before anything was saved
    sequence: int = 0  # of the call that it was saved in: it is not run again


class TrimCalls(Message):
    """Asks that the calls of an actor that stand before a sequence are dropped."""

    name: str
    before: int
