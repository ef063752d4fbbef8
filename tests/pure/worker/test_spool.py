import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.worker.contract.spool import (
    LineCutter,
    SpoolError,
    SpoolRecord,
    SpoolWriter,
    read_spool,
    read_spool_end,
)

MARK = "[fluster: output above {} bytes was dropped]"


def write(path: Path, *lines: bytes, max_log_bytes: int = 10_000) -> SpoolWriter:
    writer = SpoolWriter(path, max_log_bytes)
    for line in lines:
        writer.append("stdout", [(line, False)], 1_700_000_000.25)
    return writer


def read_all(path: Path, *, max_bytes: int = 1 << 20) -> list[SpoolRecord]:
    records: list[SpoolRecord] = []
    offset = 0
    while True:
        more, offset = read_spool(path, offset, max_bytes=max_bytes)
        if not more:
            return records
        records += more


def cut(chunks: list[bytes], max_line_bytes: int) -> list[tuple[bytes, bool]]:
    cutter = LineCutter(max_line_bytes)
    return [piece for chunk in chunks for piece in cutter.feed(chunk)] + cutter.finish()


@pytest.mark.parametrize(
    ("rest", "piece"),
    [(b"\r 10%", b"\r 10%"), ("\r é█".encode(), "\r é█".encode()), ("\r █".encode()[:-1], b"\r "), (b"", b"")],
)
def test_a_line_that_is_written_over_is_taken_before_its_end(rest: bytes, piece: bytes) -> None:
    cutter = LineCutter(1_000)
    assert cutter.feed(b"whole\n" + rest) == [(b"whole", False)]
    assert cutter.overwrites == (b"\r" in rest)
    assert cutter.take_unfinished() == ([(piece, True)] if piece else [])
    assert cutter.feed(b"\n") == [(rest[len(piece) :], False)]


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "log", 10_000)
    writer.append("stdout", [(b"  two  spaces", False), (b"", False)], 1_700_000_000.25)
    writer.append("stderr", [(b"piece", True), ("ü\x1b[31m\r".encode(), False)], 1_700_000_001.5)
    records, end = read_spool(tmp_path / "log")
    assert [record[1:] for record in records] == [
        (1_700_000_000.25, "stdout", "  two  spaces", False),
        (1_700_000_000.25, "stdout", "", False),
        (1_700_000_001.5, "stderr", "piece", True),
        (1_700_000_001.5, "stderr", "ü\x1b[31m\r", False),
    ]
    assert end == writer.end == (tmp_path / "log").stat().st_size
    writer.close()


def test_bytes_that_are_no_utf8_are_stored_as_they_are_and_shown_as_far_as_possible(tmp_path: Path) -> None:
    write(tmp_path / "log", b"a\xff\xfeb").close()
    assert b"a\xff\xfeb\n" in (tmp_path / "log").read_bytes()
    assert read_all(tmp_path / "log")[0].text == "a\ufffd\ufffdb"


def test_every_returned_offset_is_a_place_to_go_on_from(tmp_path: Path) -> None:
    write(tmp_path / "log", *(b"line %d" % number for number in range(100))).close()
    records = read_all(tmp_path / "log")
    assert [record.text for record in records] == [f"line {number}" for number in range(100)]
    for index, record in enumerate(records):
        assert read_spool(tmp_path / "log", record.offset)[0] == records[index:]
    assert read_all(tmp_path / "log", max_bytes=1) == records


def test_an_offset_within_a_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "log", b"one", b"two").close()
    with pytest.raises(SpoolError, match="no record begins at offset 7"):
        read_spool(tmp_path / "log", 7)


def test_a_record_that_is_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    write(tmp_path / "log", b"one", b"two").close()
    whole = (tmp_path / "log").read_bytes()
    first_end = whole.index(b"\n") + 1
    (tmp_path / "log").write_bytes(whole[:-2])
    records, end = read_spool(tmp_path / "log")
    assert [record.text for record in records] == ["one"]
    assert end == first_end
    assert read_spool(tmp_path / "log", end) == ([], end)
    (tmp_path / "log").write_bytes(whole)
    assert [record.text for record in read_spool(tmp_path / "log", end)[0]] == ["two"]


def test_what_is_no_record_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"nonsense\n")
    with pytest.raises(SpoolError, match="b'nonsense' at offset 0 is not a record"):
        read_spool(tmp_path / "log")


def test_above_the_cap_a_mark_stands_once_and_the_rest_is_counted(tmp_path: Path) -> None:
    writer = write(tmp_path / "log", *([b"0123456789"] * 5), max_log_bytes=150)
    writer.append("stderr", [(b"has a cap of its own", False)], 0)
    records = read_all(tmp_path / "log")
    assert [record.text for record in records] == ["0123456789"] * 3 + [MARK.format(150), "has a cap of its own"]
    assert writer.dropped_bytes == 2 * 11
    writer.close()


def test_one_append_is_stored_as_far_as_it_fits(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "log", 150)
    writer.append("stdout", [(b"0123456789", False)] * 5, 0)
    assert [record.text for record in read_all(tmp_path / "log")] == ["0123456789"] * 3 + [MARK.format(150)]
    assert writer.dropped_bytes == 2 * 11
    writer.close()


def test_a_full_disk_loses_whole_records_and_says_so_when_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(tmp_path / "log", b"before")
    really_write = os.write

    def write_half_and_fail(fd: int, data: memoryview) -> int:
        if len(data) > 20:
            return really_write(fd, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_half_and_fail)
        writer.append("stdout", [(b"lost", False)], 0)
        writer.append("stdout", [(b"lost, too", False)], 0)
    assert [record.text for record in read_all(tmp_path / "log")] == ["before"]
    writer.append("stdout", [(b"after", False)], 0)
    mark = f"[fluster: 15 bytes of output were lost: {os.strerror(errno.ENOSPC)}]"
    assert [record.text for record in read_all(tmp_path / "log")] == ["before", mark, "after"]
    assert writer.dropped_bytes == 15
    writer.close()


@given(st.lists(st.binary(max_size=60)), st.integers(16, 40))
def test_pieces_are_the_stream_cut_up(chunks: list[bytes], max_line_bytes: int) -> None:
    pieces = cut(chunks, max_line_bytes)
    data = b"".join(chunks)
    ended = data if data.endswith(b"\n") or not data else data + b"\n"
    assert b"".join(text + (b"" if is_partial else b"\n") for text, is_partial in pieces) == ended
    assert all(len(text) <= max_line_bytes for text, _ in pieces)


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=200), st.integers(1, 50))
def test_no_character_is_cut_in_two(line: str, chunk_bytes: int) -> None:
    data = line.encode()
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    assert "".join(text.decode() for text, _ in cut(chunks, 16)) == line


def test_a_line_that_never_ends_does_not_pile_up() -> None:
    cutter = LineCutter(1000)
    for _ in range(100):
        cutter.feed(b"x" * 64_000)
        assert len(cutter._rest) <= 1000  # noqa: SLF001 - bounded memory


def test_the_end_is_read_in_whole_records(tmp_path: Path) -> None:
    write(tmp_path / "log", *(b"line %d" % number for number in range(100))).close()
    records = read_all(tmp_path / "log")
    assert read_spool_end(tmp_path / "log", max_bytes=1 << 20) == (records, True)
    size = (tmp_path / "log").stat().st_size
    assert read_spool_end(tmp_path / "log", max_bytes=size) == (records, True)
    for max_bytes in range(1, size, 97):
        found, is_all = read_spool_end(tmp_path / "log", max_bytes=max_bytes)
        assert not is_all
        assert found == [record for record in records if record.offset >= size - max_bytes]
