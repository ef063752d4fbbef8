"""Which stored calls are run, whatever comes again and whenever the one who runs them ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fluster.actors.server.durable import REMEMBERED, REMEMBERED_BYTES, CallLog


def test_what_was_handled_is_not_new() -> None:
    log = CallLog(2)
    assert [log.is_new(sequence, f"call-{sequence}", 1) for sequence in (1, 2, 3)] == [False, False, True]


def test_a_call_that_comes_again_counts_as_handled() -> None:
    log = CallLog()
    log.on_handled(1, "a", 1)
    assert not log.is_new(2, "a", 1)
    assert log.handled == 2


def test_calls_are_dropped_some_at_a_time_and_never_those_that_are_remembered() -> None:
    log = CallLog()
    dropped = []
    for sequence in range(1, 4 * REMEMBERED + 1):
        log.on_handled(sequence, str(sequence), 1)
        before = log.droppable()
        if before is not None:
            assert before == sequence - REMEMBERED + 1
            dropped.append(sequence)
    assert dropped == [2 * REMEMBERED, 3 * REMEMBERED, 4 * REMEMBERED]


def test_few_large_calls_are_remembered() -> None:
    log = CallLog()
    for sequence in range(1, 100):
        log.on_handled(sequence, str(sequence), REMEMBERED_BYTES // 4)
    assert log.droppable() == 96
    log.on_handled(100, "huge", 2 * REMEMBERED_BYTES)
    assert log.droppable() == 100


class _Stream:
    """Calls as they are stored, some of them dropped again, and one after the other who runs them."""

    def __init__(self, calls: list[tuple[str, int]]) -> None:
        self.stored = dict(enumerate(calls, start=1))
        self.handled = 0  # as it is written down
        self.ran: list[str] = []

    def serve(self, *, handles: int, ends_unwritten: bool) -> None:
        """Run the next ones, as one does who begins; perhaps one more without writing that down."""
        log = CallLog(self.handled)
        for sequence, (call_id, size) in list(self.stored.items()):
            if not log.is_new(sequence, call_id, size):
                continue
            if handles == 0:
                if ends_unwritten:
                    self.ran.append(call_id)
                return
            handles -= 1
            self.ran.append(call_id)
            log.on_handled(sequence, call_id, size)
            self.handled = sequence
            before = log.droppable()
            if before is not None:
                self.stored = {number: call for number, call in self.stored.items() if number >= before}


_CALLS = st.lists(
    st.tuples(st.integers(0, 300).map(str), st.sampled_from([1, 1, 1, REMEMBERED_BYTES // 8])), max_size=400
)


@given(_CALLS, st.lists(st.tuples(st.integers(0, 150), st.booleans()), max_size=8))
def test_no_call_is_lost_nor_overtaken_and_one_that_comes_again_soon_is_run_once(
    calls: list[tuple[str, int]], servers: list[tuple[int, bool]]
) -> None:
    stream = _Stream(calls)
    undisturbed = _Stream(calls)
    undisturbed.serve(handles=len(calls), ends_unwritten=False)
    again = 0
    for handles, ends_unwritten in servers:
        before = len(stream.ran)
        stream.serve(handles=handles, ends_unwritten=ends_unwritten)
        again += ends_unwritten and len(stream.ran) - before > handles
    stream.serve(handles=len(calls), ends_unwritten=False)
    # The same calls in the same order, but for those that ran once more since their server ended right after.
    assert len(stream.ran) <= len(undisturbed.ran) + again
    expected = iter(undisturbed.ran)
    current = None
    for call_id in stream.ran:
        if call_id != current:
            current = next(expected)
        assert call_id == current
    assert next(expected, None) is None
    assert {call_id for call_id, _size in calls} == set(stream.ran)
