"""What a task writes of itself, in its error, its folder and its log, ends that attempt and not the worker that reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.progress_file import PROGRESS_FILE, read_progress
from fluster_bus.messages import JobStatus, LogBatch
from fluster_bus.messages import TaskError as ToldError
from fluster_services.worker.contract.attempt_directory import (
    KEEPER_FILE,
    RESULT_FILE,
    RESULT_WORD_FILE,
    read_json,
    read_json_lines,
)
from fluster_services.worker.contract.attempt_records import TaskError, describe_error, task_error, to_json
from fluster_services.worker.contract.container_output import InitWords
from fluster_services.worker.contract.outcome import outcome
from fluster_services.worker.contract.spool import SpoolError, read_spool, read_spool_end
from fluster_services.worker.keeper.leftovers import exit_note, exit_record, start_note
from fluster_services.worker.task.task_result import find_result

ENDED = {"exit_code": 1, "signal": None, "reason": "exited"}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "\udce9", "caf\xe9", "a" * 70_000, "\x1b[2J", float("nan"), 1 << 80, -1]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "message", "pickled"]), inner),
    max_leaves=5,
)
FIELDS = [
    "exit_code",
    "signal",
    "reason",
    "kill_reason",
    "error",
    "log_tail",
    "started_at",
    "oom",
    "memory_limit",
    "disk_limit",
    "surviving_pids",
    "result_bytes",
    "result_json_bytes",
    "result_error",
    "newer",
]


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
@example({"error": {"type": "\udce9", "message": "\udce9", "pickled": "caf\xe9"}})
@example({"kill_reason": "x" * 4_000_000, "reason": "killed"})
@example({"log_tail": ["\udce9" * 100_000] * 1_000})
@example({"signal": 10_000})
@example({"exit_code": 0, "result_bytes": -1, "result_json_bytes": 1 << 60})
def test_an_end_of_the_tasks_own_making_can_be_told(told: dict[str, Any]) -> None:
    ended = outcome(exit_record({**ENDED, **told}))
    shown = json.dumps([ended.reason, ended.last_words], ensure_ascii=False).encode()
    assert len(shown) < 300_000
    for message in (ended.error, ended.result):
        assert message is None or len(message.to_json()) < 1 << 20


@pytest.mark.parametrize("data", [None, [], "x", 1, {}, {"reason": "nowhere"}, {**ENDED, "error": {"type": 1}}])
def test_an_end_that_cannot_be_read_is_a_failure(data: Any) -> None:
    ended = outcome(exit_record(data))
    assert ended.state is JobStatus.FAILED
    assert "was written over" in ended.reason


def test_an_error_that_is_no_text_is_told_as_python_writes_it() -> None:
    error = task_error(to_json(describe_error(ValueError(os.fsdecode(b"caf\xe9")))))
    assert error is not None
    assert error.message == "caf\\udce9"
    ToldError(type=error.type, message=error.message, traceback=error.traceback).to_json()


@pytest.mark.parametrize("pickled", ["caf\xe9", "=", "A" * 4_000_000, "\udce9", "not base64!"])
def test_what_is_no_pickled_error_is_left_out(pickled: str) -> None:
    error = task_error({"type": "E", "message": "m" * 4_000_000, "pickled": pickled})
    assert error is not None
    assert (error.pickled, len(error.message)) == (None, 16 * 1024)
    assert task_error({"type": "E", "message": "m", "traceback": "x" * 4_000_000}) == TaskError(
        "E", "m", "x" * 64 * 1024
    )


@pytest.mark.parametrize(
    "line",
    [
        {"started": None},
        {"started": []},
        {"started": {}},
        {"started": {"task_pid": "1", "keeper_pid": 2, "started_at": 0.0, "started_since_boot_s": 0.0}},
        {"started": {"task_pid": 1, "keeper_pid": 1, "started_at": 0.0, "started_since_boot_s": 0.0}},
    ],
)
def test_a_note_of_a_start_that_is_none_is_passed_over(tmp_path: Path, line: dict[str, Any]) -> None:
    (tmp_path / KEEPER_FILE).write_text(json.dumps(line) + "\n")
    assert start_note(tmp_path) is None


@given(st.binary(max_size=200))
@example(b"[" * 100_000 + b"\n")
@example(b'{"exited": 1}\n')
@example(b'{"exited": {"signal": {}}}\n')
def test_notes_that_are_none_are_passed_over(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KEEPER_FILE).write_bytes(data)
        start_note(Path(folder))
        exit_note(Path(folder))


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "endless"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    match kind:
        case "pipe":
            os.mkfifo(place)
        case "link":
            (tmp_path / "secret").write_text('{"a": 1}\n')
            place.symlink_to(tmp_path / "secret")
        case "folder":
            place.mkdir()
        case _:
            place.symlink_to("/dev/zero")
    assert (read_json(place), read_json_lines(place)) == (None, {})
    with pytest.raises(SpoolError):
        read_spool(place)
    with pytest.raises(SpoolError):
        read_spool_end(place, max_bytes=100)


@given(st.binary(max_size=300), st.integers(0, 10))
@example(b"2024-01-01T00:00:00Z stdout F a\n2024-01-01T00:00:00Z nowhere F b\n", 0)
@example(b"0001-01-01T00:00:00 stdout F a\n", 0)
@example(b"\xff\xfe stdout F a\n", 0)
def test_a_log_that_was_written_over_is_read_no_further(data: bytes, start: int) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        try:
            records, _ = read_spool(file.name, start)
        except SpoolError:
            return
        LogBatch(offset=0, next_offset=1, more=False, lines=tuple((each.time, each.text) for each in records)).to_json()


def test_a_record_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.truncate(1 << 32)
    with pytest.raises(SpoolError, match="does not end"):
        read_spool(tmp_path / "log")


TINI = b"[INFO  tini (1)] Main child exited normally (with status '%b')\n"


@given(st.lists(st.binary(max_size=20) | st.just(TINI % b"7") | st.just(TINI[:20]), max_size=8))
@example([TINI % (b"9" * 5_000)])
def test_what_the_init_seems_to_say_is_heard_or_passed_on(pieces: list[bytes]) -> None:
    """Its keeper died of a number with more digits than Python reads."""
    words = InitWords()
    said = b"".join(map(words.sift, pieces)) + words.rest()
    assert len(said) <= sum(map(len, pieces))
    assert words.exit_code is None or 0 <= words.exit_code < 1_000


FORGED = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reason", "json_bytes"]), inner),
    max_leaves=6,
)


@given(FORGED.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30))
@example(b'{"json_bytes": %b}' % (b"9" * 5_000))
@example(b"[" * 5_000)
def test_any_word_about_a_result_is_a_size_or_a_problem(word: bytes) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / RESULT_FILE).write_bytes(b"pickled")
        (folder / RESULT_WORD_FILE).write_bytes(word)
        found = find_result(folder)
    assert (found.size is None) == (found.problem is not None)
    assert 0 <= found.json_size <= len(b"pickled")
    assert len(found.problem or "") <= 1_000


@given(FORGED.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=30))
@example(b"[%b, 1]" % (b"9" * 5_000))
@example(b"[" * 5_000)
def test_any_progress_is_a_part_of_the_whole_or_none(text: bytes) -> None:
    with TemporaryDirectory() as name:
        (Path(name) / PROGRESS_FILE).write_bytes(text)
        found = read_progress(Path(name))
    assert found is None or (0 <= found.fraction <= 1 and found.message.encode() is not None)
