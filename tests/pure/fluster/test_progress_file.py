"""How far a task is, from its own word to its keeper."""

import os
import select
from pathlib import Path
from typing import Any

import pytest

from fluster.progress_file import (
    MAX_PROGRESS_CHARACTERS,
    PROGRESS_FILE,
    Progress,
    checked_progress,
    make_progress_pipe,
    read_progress,
    write_progress,
)


@pytest.mark.parametrize("fraction", [0, 1, 0.5, True])
def test_fractions_are_between_0_and_1(fraction: float) -> None:
    assert checked_progress(fraction, "") == Progress(float(fraction), "")


@pytest.mark.parametrize("fraction", [-0.1, 1.1, 50, float("nan"), float("inf")])
def test_others_are_refused_by_name(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction={fraction!r} is not between 0 and 1"):
        checked_progress(fraction, "")


@pytest.mark.parametrize(("fraction", "message"), [("0.5", ""), (None, ""), (0.5, b"bytes"), (0.5, None)])
def test_other_types_are_refused(fraction: Any, message: Any) -> None:
    with pytest.raises(TypeError):
        checked_progress(fraction, message)


def test_a_long_message_is_cut() -> None:
    message = checked_progress(0.5, "x" * 10_000).message
    assert len(message) == MAX_PROGRESS_CHARACTERS
    assert message.endswith("x…")


@pytest.mark.parametrize("message", ["", "epoch 3", "ünïcødé 🎉" * 50, "\0" * 500, "\ud800", '"\n\\'])
def test_what_was_told_last_is_read(tmp_path: Path, message: str) -> None:
    pipe = make_progress_pipe(tmp_path)
    assert read_progress(tmp_path) is None
    write_progress(tmp_path, checked_progress(0.25, "something longer than what comes next"))
    write_progress(tmp_path, checked_progress(0.5, message))
    assert os.read(pipe, 100) == b".."
    told = read_progress(tmp_path)
    assert told is not None
    assert told.fraction == 0.5
    assert told.message == message.encode(errors="replace").decode()
    os.close(pipe)


def test_a_full_pipe_does_not_block_and_loses_nothing(tmp_path: Path) -> None:
    pipe = make_progress_pipe(tmp_path)
    while select.select([], [pipe], [], 0)[1]:
        os.write(pipe, b"." * 512)
    write_progress(tmp_path, Progress(1.0, "done"))
    assert read_progress(tmp_path) == Progress(1.0, "done")
    os.close(pipe)


def test_nobody_is_told_when_there_is_no_keeper(tmp_path: Path) -> None:
    write_progress(tmp_path, Progress(0.5, ""))
    assert list(tmp_path.iterdir()) == []
    os.close(make_progress_pipe(tmp_path))
    write_progress(tmp_path, Progress(0.5, ""))  # it died


@pytest.mark.parametrize("text", ["", "nonsense", "[2, 3]", "[0.5]", '["a", "b"]', "[" * 4000, "{}", "7"])
def test_nonsense_is_no_progress(tmp_path: Path, text: str) -> None:
    (tmp_path / PROGRESS_FILE).write_text(text)
    assert read_progress(tmp_path) is None


def test_a_link_or_nothing_is_no_progress(tmp_path: Path) -> None:
    assert read_progress(tmp_path) is None
    (tmp_path / "other").write_text('[0.5, "secret"]')
    (tmp_path / PROGRESS_FILE).symlink_to(tmp_path / "other")
    assert read_progress(tmp_path) is None
