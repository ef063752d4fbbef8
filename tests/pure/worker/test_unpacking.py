"""Archives that mean harm, and archives that are damaged."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluster.cluster.workspaces import WORKSPACE_LIMITS, WorkspaceLimits
from fluster_services.worker.environments.workspaces import (
    ArchiveBrokenError,
    CompressionRatioError,
    TooLargeError,
    TooManyFilesError,
    UnpackError,
    UnsafeMemberError,
    unpack,
)

SMALL = WorkspaceLimits(files=20, bytes=100_000, archive_bytes=100_000, ratio=50, free_bytes=10_000)


@dataclass(frozen=True)
class Place:
    """A folder with an archive, the folder that it is unpacked to, and something beside that is to stay as it is."""

    folder: Path

    @property
    def archive(self) -> Path:
        return self.folder / "workspace.zip"

    @property
    def there(self) -> Path:
        return self.folder / "deep" / "unpacked"

    def write(self, *members: tuple[zipfile.ZipInfo | str, bytes]) -> None:
        with zipfile.ZipFile(self.archive, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, data in members:
                archive.writestr(member, data)

    def unpack(self, limits: WorkspaceLimits = SMALL) -> None:
        unpack(self.archive, self.there, limits)

    def check_unharmed(self) -> None:
        """Nothing is outside of the folder, and nothing in it leads or belongs to anywhere else."""
        outside = {path for path in self.folder.rglob("*") if not path.is_relative_to(self.there)}
        assert outside == {self.archive, self.folder / "deep", self.folder / "beside"}
        assert (self.folder / "beside").read_text() == "untouched"
        for path in self.there.rglob("*"):
            mode = path.lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            assert not mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX) or stat.S_ISLNK(mode)


def _new_place(folder: Path) -> Place:
    (folder / "deep").mkdir()
    (folder / "beside").write_text("untouched")
    return Place(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "place").mkdir()
    return _new_place(tmp_path / "place")


def _member(name: str, mode: int = stat.S_IFREG | 0o644, **fields: int) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo("placeholder")
    member.filename = name  # as it is: the constructor would tidy it
    member.external_attr = mode << 16
    for field, value in fields.items():
        setattr(member, field, value)
    return member


def _link(name: str, target: str) -> tuple[zipfile.ZipInfo, bytes]:
    return _member(name, stat.S_IFLNK | 0o777), target.encode()


# ---- paths ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../slipped",
        "a/../../slipped",
        "a/..",
        "..",
        "/tmp/absolute",
        "//double",
        "a//b",
        "./a",
        "a/./b",
        "",
        "/",
        "a" + "/a" * 300,
    ],
)
def test_paths_that_are_not_below_the_folder_are_refused(place: Place, name: str) -> None:
    place.write((_member("fine"), b"fine"), (_member(name), b"slipped"))
    with pytest.raises(UnsafeMemberError, match="the workspace has"):
        place.unpack()
    place.check_unharmed()


def test_a_name_with_a_null_in_it_is_refused(place: Place) -> None:
    place.write((_member("aXb"), b""))
    place.archive.write_bytes(place.archive.read_bytes().replace(b"aXb", b"a\0b"))
    with pytest.raises(UnsafeMemberError, match=r"a\\x00b"):
        place.unpack()


@pytest.mark.parametrize("second", ["same", "same/", "same/below"])
def test_names_that_are_there_twice_are_refused(place: Place, second: str) -> None:
    with pytest.warns(UserWarning, match="Duplicate") if second == "same" else pytest.MonkeyPatch.context():
        place.write((_member("same"), b"1"), (_member(second, 0), b""))
    with pytest.raises(UnsafeMemberError, match=r"twice|below 'same', which is not a folder"):
        place.unpack()
    place.check_unharmed()


# ---- links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["/etc", "../..", "a/../../..", "..", "/", "", "a\0b", "x" * 5_000])
def test_links_that_lead_out_are_refused(place: Place, target: str) -> None:
    place.write((_member("a/b"), b""), _link("link", target))
    with pytest.raises(UnsafeMemberError, match="the link 'link' to"):
        place.unpack()
    place.check_unharmed()


def test_links_that_lead_out_together_are_refused(place: Place) -> None:
    """Each looks harmless: by its text, a/b/out stays in a."""
    place.write((_member("a/b/c/file"), b""), _link("up", "a/b/c"), _link("a/b/in", "../.."), _link("a/b/out", "in/.."))
    with pytest.raises(UnsafeMemberError, match=r"'a/b/out' to in/\.\., which leads out"):
        place.unpack()


def test_nothing_is_written_through_a_link(place: Place) -> None:
    for first, second in (("link", "link/slipped"), ("link", "link")):
        members = [_link(first, "../../deep"), (_member(second), b"slipped")]
        if first == second:
            with pytest.warns(UserWarning, match="Duplicate"):
                place.write(*members)
        else:
            place.write(*members)
        with pytest.raises(UnsafeMemberError, match=r"twice|which is not a folder"):
            place.unpack()
        place.check_unharmed()
        place.there.rmdir()


def test_links_within_are_made(place: Place) -> None:
    place.write((_member("a/file"), b"x"), _link("link", "a/file"), _link("a/self", "."), _link("dangling", "nowhere"))
    place.unpack()
    assert (place.there / "link").read_text() == "x"
    place.check_unharmed()


# ---- kinds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_devices_pipes_and_sockets_are_refused(place: Place, kind: int) -> None:
    place.write((_member("odd", kind | 0o666), b""))
    with pytest.raises(UnsafeMemberError, match="'odd', which is neither file, folder nor link"):
        place.unpack()


@pytest.mark.parametrize("bit", [stat.S_ISUID, stat.S_ISGID, stat.S_ISVTX])
def test_bits_that_give_rights_are_refused(place: Place, bit: int) -> None:
    place.write((_member("tool", stat.S_IFREG | 0o755 | bit), b""))
    with pytest.raises(UnsafeMemberError, match="'tool' with the set-user-id"):
        place.unpack()


@pytest.mark.parametrize(("name", "kind"), [("a/", stat.S_IFREG), ("a/", stat.S_IFLNK), ("a", stat.S_IFDIR)])
def test_a_folder_that_says_it_is_none_is_refused(place: Place, name: str, kind: int) -> None:
    place.write((_member(name, kind | 0o755), b""))
    with pytest.raises(UnsafeMemberError, match="not by both"):
        place.unpack()


def test_encrypted_and_oddly_packed_members_are_refused(place: Place) -> None:
    with zipfile.ZipFile(place.archive, "w") as archive:
        archive.writestr(_member("a"), b"x" * 100, zipfile.ZIP_LZMA)
    with pytest.raises(UnsafeMemberError, match="unusual way"):
        place.unpack()
    place.there.rmdir()
    place.write((_member("a"), b"x"))
    data = bytearray(place.archive.read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 0x1
    place.archive.write_bytes(data)
    with pytest.raises(UnsafeMemberError, match="encrypted"):
        place.unpack()


# ---- how much -------------------------------------------------------------------------------------------


def test_each_bound_has_its_own_error(place: Place) -> None:
    cases: list[tuple[type[UnpackError], list[tuple[zipfile.ZipInfo | str, bytes]], str]] = [
        (TooManyFilesError, [(f"f{number}", b"") for number in range(21)], "21 files, over the limit of 20"),
        (TooLargeError, [("a", os.urandom(60_000)), ("b", os.urandom(50_000))], "110,000 bytes, over the limit"),
        (CompressionRatioError, [("zeros", bytes(90_000))], "90,000 bytes from .*, over the limit of 50 to 1"),
    ]
    for error, members, message in cases:
        place.write(*members)
        with pytest.raises(error, match=message):
            place.unpack()
        assert list(place.there.iterdir()) == [], "refused before anything is unpacked"
        place.there.rmdir()
    place.write(("zeros", bytes(9_000)))
    place.unpack()


def test_an_archive_that_tells_less_than_it_holds_is_refused(place: Place) -> None:
    place.write(("a", bytes(90_000)))
    data = bytearray(place.archive.read_bytes())
    for mark, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):  # where each record tells the size
        start = data.index(mark) + offset
        data[start : start + 4] = struct.pack("<L", 100)
    place.archive.write_bytes(data)
    with pytest.raises(UnpackError):
        place.unpack()
    assert sum(path.stat().st_size for path in place.there.rglob("*")) <= 100


def test_an_index_that_would_fill_the_memory_is_not_read(place: Place) -> None:
    place.write(("a", b""))
    data = bytearray(place.archive.read_bytes())
    end = len(data) - 22
    lying = data.copy()
    lying[end + 12 : end + 16] = struct.pack("<L", 1 << 30)
    place.archive.write_bytes(lying)
    with pytest.raises(TooManyFilesError, match="an index of 1,073,741,824 bytes"):
        place.unpack()
    place.there.rmdir()
    place.archive.write_bytes(data[:end] + b"PK\x06\x07" + bytes(16) + data[end:])
    with pytest.raises(TooLargeError, match="more than 65,535 files"):
        place.unpack()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: b"no archive at all",
        lambda data: data[:-1],
        lambda data: data[10:],
        lambda data: data + b"x",
        lambda data: data.replace(b"hello", b"jello"),
        lambda data: data[:40] + b"\xff" * 4 + data[44:],
    ],
)
def test_damaged_archives_are_said_to_be_damaged(place: Place, spoil: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(place.archive, "w") as archive:
        archive.writestr("a", b"hello, world")
    place.archive.write_bytes(spoil(place.archive.read_bytes()))
    with pytest.raises(ArchiveBrokenError):
        place.unpack()


# ---- whatever comes -------------------------------------------------------------------------------------

NAME = st.lists(st.sampled_from(["a", "b", "..", ".", "", "c" * 300, "\0", "~", "a\\b", "é"]), max_size=4).map("/".join)
KINDS = [stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO, 0]
MEMBER = st.tuples(NAME, st.sampled_from(KINDS), st.sampled_from([0, 0o644, 0o4755, 0o7777]), NAME)
FUZZ = settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(members=st.lists(MEMBER, max_size=6))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_archive_gets_out(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, int, int, str]]
) -> None:
    place = _new_place(tmp_path_factory.mktemp("fuzz"))
    place.write(*((_member(name, kind | mode), text.encode()) for name, kind, mode, text in members))
    try:
        place.unpack()
    except (UnpackError, OSError):
        pass  # what is there then is deleted
    else:
        root = os.path.realpath(place.there)
        assert all(Path(os.path.realpath(path)).is_relative_to(root) for path in place.there.rglob("*"))
    place.check_unharmed()


@FUZZ
@given(data=st.data())
def test_no_damage_ends_otherwise_than_with_our_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    place = _new_place(tmp_path_factory.mktemp("damage"))
    place.write(("a/b.txt", b"hello" * 100), _link("link", "a"), ("c/", b""))
    spoiled = bytearray(place.archive.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] = data.draw(st.integers(0, 255))
    place.archive.write_bytes(spoiled)
    with contextlib.suppress(UnpackError, OSError):
        place.unpack(replace(WORKSPACE_LIMITS, bytes=100_000))
    place.check_unharmed()
