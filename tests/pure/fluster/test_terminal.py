"""What may reach a terminal of what others have written."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.terminal import for_terminal, shown


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "42%|####  |\r43%",
        "a\tb\n",
        "\x1b[1;31mred\x1b[0m",
        "\x1b[38:5:208morange\x1b[m",
        "äß 中文 🎉",
        "e\u0301",
    ],
)
def test_colours_tabs_and_ends_of_lines_stay(text: str) -> None:
    assert for_terminal(text) == text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x07", r"\x07"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),  # retitles the window
        ("\x1b]52;c;cm0gLXJm\x07", r"\x1b]52;c;cm0gLXJm\x07"),  # fills the clipboard
        ("\x1b[6n", r"\x1b[6n"),  # has the terminal type an answer
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("\x9b31m", r"\x9b31m"),  # one character for `ESC [`, to terminals of 8 bits
        ("\x1b[\x1b[31m", "\\x1b[\x1b[31m"),
        ("\u202etxt.exe", r"\u202etxt.exe"),  # written from right to left from here on
        ("\u2066a\u2069", r"\u2066a\u2069"),
        ("\x7f\x00", r"\x7f\x00"),
    ],
)
def test_all_else_that_steers_a_terminal_is_shown_as_text(text: str, safe: str) -> None:
    assert for_terminal(text) == safe


@given(st.text(st.characters(max_codepoint=0x20FF)))
def test_what_is_left_steers_nothing(text: str) -> None:
    left = re.sub(r"\x1b\[[0-9;:]*m", "", for_terminal(text))
    assert [each for each in left if not each.isprintable() and each in "\x1b\x07\x08\x7f\x9b\u202e\u2066\u200f"] == []


def test_a_pipe_gets_it_as_it_was_written_and_a_terminal_made_safe() -> None:
    terminal, line = os.openpty()
    with os.fdopen(terminal), os.fdopen(line, "w") as screen, Path(os.devnull).open("w", encoding="utf-8") as pipe:
        assert (shown("\x1b[2J", screen), shown("\x1b[2J", pipe)) == (r"\x1b[2J", "\x1b[2J")
