"""No namespace keeps the requests of the others waiting, however many it sends, and what waits is bounded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.controller.answers.request_lines import LineLimits, RequestLines, Turn

FEW = LineLimits(at_once=2, max_waiting=3, max_waiting_bytes=100, patience_s=1.0)


def enter(lines: RequestLines[str], namespace: str, *items: str, size: int = 1, now: float = 0.0) -> list[bool]:
    return [lines.enter(namespace, item, size=size, now=now) for item in items]


def turns(lines: RequestLines[str], count: int, *, now: float = 0.0) -> list[Turn[str]]:
    return [turn for _ in range(count) if (turn := lines.next(now=now)) is not None]


def test_a_request_of_another_namespace_has_the_turn_after_the_next_however_many_wait() -> None:
    lines = RequestLines[str]()
    enter(lines, "attacker", *map(str, range(1_000)))
    assert [turn.item for turn in turns(lines, 3)] == ["0", "1", "2"]
    enter(lines, "other", "mine")
    assert "mine" in [turn.item for turn in turns(lines, 2)]


def test_namespaces_take_turns_also_when_those_of_one_ask_for_more_of_them() -> None:
    lines = RequestLines[str]()
    enter(lines, "attacker", *map(str, range(100)))
    enter(lines, "other", *map(str, range(10)))
    had = Counter[str]()
    for _ in range(40):
        turn = lines.next(now=0)
        assert turn is not None
        had[turn.namespace] += 1
        if turn.namespace == "attacker":
            lines.again(turn.namespace, turn.number, turn.item)  # it takes for ever
        else:
            lines.end(turn.namespace, 1)
    assert had["other"] == 10


def test_what_was_begun_first_goes_first_among_those_of_its_namespace() -> None:
    lines = RequestLines[str]()
    enter(lines, "ns", "a", "b", "c")
    a, b = turns(lines, 2)
    lines.again("ns", b.number, "more of b")
    lines.again("ns", a.number, "more of a")
    assert [turn.item for turn in turns(lines, 3)] == ["more of a", "more of b", "c"]


def test_more_than_may_wait_are_refused_and_those_of_others_are_not() -> None:
    lines = RequestLines[str](FEW)
    assert enter(lines, "ns", "a", "b", "c", "d") == [True, True, True, False]
    assert enter(lines, "other", "a") == [True]
    assert len(lines) == 4


def test_waiting_bytes_are_bounded_and_one_request_may_always_wait() -> None:
    lines = RequestLines[str](FEW)
    assert enter(lines, "ns", "a", "b", size=60) == [True, False]
    assert enter(lines, "big", "a", "b", size=1_000) == [True, False]
    turns(lines, 2)
    assert enter(lines, "ns", "b", size=60) == [True]


def test_only_so_many_are_in_hand_and_an_answer_makes_room() -> None:
    lines = RequestLines[str](FEW)
    enter(lines, "ns", "a", "b", "c")
    assert [turn.item for turn in turns(lines, 3)] == ["a", "b"]
    lines.end("ns", 1)
    assert [turn.item for turn in turns(lines, 3)] == ["c"]


def test_only_so_many_bytes_are_in_hand_and_a_large_one_is_alone() -> None:
    """Read, each takes some fifty times as much: 64 of a megabyte took gigabytes."""
    lines = RequestLines[str](LineLimits(max_bytes_at_once=100))
    enter(lines, "ns", "a", size=60)
    enter(lines, "ns", "b", size=500)
    enter(lines, "ns", "c", "d", size=40)
    enter(lines, "other", "e", size=500)
    assert [turn.item for turn in turns(lines, 9)] == ["a", "e"]
    lines.end("ns", 60)
    assert [turn.item for turn in turns(lines, 9)] == ["b"]
    lines.end("ns", 500)
    assert [turn.item for turn in turns(lines, 9)] == ["c", "d"]


def test_one_that_has_waited_for_too_long_is_not_begun() -> None:
    lines = RequestLines[str](FEW)
    enter(lines, "ns", "a", now=0)
    enter(lines, "ns", "b", now=1)
    late, fresh = turns(lines, 2, now=1.5)
    assert (late.item, late.is_late) == ("a", True)
    assert (fresh.item, fresh.is_late) == ("b", False)


@given(st.lists(st.tuples(st.sampled_from(["enter", "next", "again", "end"]), st.sampled_from("abc")), max_size=200))
def test_nothing_is_lost_nor_kept(steps: list[tuple[str, str]]) -> None:
    lines = RequestLines[str](FEW)
    waiting, in_hand, wants = Counter[str](), Counter[str](), Counter[str]()
    number = 0
    for what, namespace in steps:
        if what == "enter":
            waiting[namespace] += lines.enter(namespace, "x", size=1, now=0)
            assert waiting[namespace] <= FEW.max_waiting
        elif what == "next":
            turn = lines.next(now=0)
            able = [each for each in "abc" if wants[each] or (waiting[each] and in_hand[each] < FEW.at_once)]
            assert (turn is None) == (not able)
            if turn is not None and turn.is_new:
                waiting[turn.namespace] -= 1
                in_hand[turn.namespace] += 1
            elif turn is not None:
                wants[turn.namespace] -= 1
        elif what == "again" and in_hand[namespace] > wants[namespace]:
            number += 1
            lines.again(namespace, number, "x")
            wants[namespace] += 1
        elif what == "end" and in_hand[namespace] > wants[namespace]:
            lines.end(namespace, 1)
            in_hand[namespace] -= 1
        assert len(lines) == waiting.total()


@pytest.mark.parametrize("count", [10, 10_000])
def test_an_idle_namespace_leaves_nothing_behind(count: int) -> None:
    lines = RequestLines[str]()
    for number in range(count):
        enter(lines, f"ns{number}", "a")
        turns(lines, 1)
        lines.end(f"ns{number}", 1)
    assert lines.is_idle
