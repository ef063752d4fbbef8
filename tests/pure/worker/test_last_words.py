import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.worker.contract.outcome import MAX_BYTES, MAX_LINES, last_words


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m alert", "red alert"),
        ("\x1b]0;a title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPsecret\x1b\\after", "after"),
        ("\x1b]0;never ends", ""),
        ("\x1b(Bascii\x1b7\x1bc", "ascii"),
        ("10%\r50%\r90%\r", "90%"),
        ("tab\there\x00\x08", "tab here"),
        ("\x9b31mred", "red"),
        ("\x1b", ""),
        ("größer 日本", "größer 日本"),
        ("x" * 501, "x" * 500 + "…"),
    ],
)
def test_a_line_is_shown_as_text_alone(line: str, shown: str) -> None:
    assert last_words([line]) == shown


def test_only_the_last_lines_are_told() -> None:
    assert last_words([f"line {number}" for number in range(100)]).splitlines() == [
        f"line {number}" for number in range(80, 100)
    ]


def test_only_so_many_bytes_are_told_and_only_whole_lines() -> None:
    told = last_words(["ü" * 400] * 20)
    assert len(told.encode()) <= MAX_BYTES
    assert set(told.splitlines()) == {"ü" * 400}


def test_empty_lines_around_are_not_told() -> None:
    assert last_words(["", "a", "", "b", "", ""]) == "a\n\nb"


@given(st.lists(st.text(), max_size=40))
def test_it_is_bounded_and_harmless(lines: list[str]) -> None:
    told = last_words(lines)
    assert len(told.encode()) <= MAX_BYTES
    assert told.count("\n") < MAX_LINES
    assert all(each.isprintable() or each == "\n" for each in told)
