"""For how long the end of a program is reported."""

from __future__ import annotations

from fluster.owner_helper import LastWords, LeaseAnswer

LEFT, NONE_LEFT = LeaseAnswer(600, 1), LeaseAnswer(600, 0)
DAY_S = 86_400.0


def told_until(answers: dict[float, LeaseAnswer | None]) -> float:
    """When the last word is said, with the answers of these times on; the first word is at 0."""
    now, words = 0.0, LastWords(0.0)
    while True:
        answer = answers[max(at for at in answers if at <= now)]
        pause_s = words.pause_s(answer, now=now)
        if pause_s is None:
            return now
        assert 0 < pause_s <= 30
        now += pause_s


def test_it_is_told_until_nothing_is_left() -> None:
    assert 2 < told_until({0: NONE_LEFT}) < 5, "what it submitted last may still come"
    assert 60 <= told_until({0: LEFT, 60: NONE_LEFT}) < 66


def test_a_controller_that_knows_is_left_alone_after_a_while() -> None:
    assert 120 <= told_until({0: LEFT}) < 126


def test_while_nobody_answers_it_is_told_on_for_a_day() -> None:
    away_s = 3 * 3600.0
    assert away_s <= told_until({0: None, away_s: NONE_LEFT}) < away_s + 31
    assert away_s + 60 <= told_until({0: LEFT, 60: None, away_s: LEFT, away_s + 60: NONE_LEFT}) < away_s + 66
    assert DAY_S <= told_until({0: None}) < DAY_S + 31
