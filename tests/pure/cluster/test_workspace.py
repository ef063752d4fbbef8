"""What is packed of a folder, and how it looks where it is unpacked."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluster.cluster.workspaces import WORKSPACE_LIMITS, pack
from fluster.errors import WorkspaceError
from fluster_services.worker.environments.workspaces import unpack


def _fill(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def _packed(folder: Path) -> bytes:
    with pack(folder) as archive:
        archive.seek(0)
        return archive.read()


def _travel(folder: Path, place: Path) -> Path:
    """Pack `folder` and unpack it in `place`."""
    archive = place / "workspace.zip"
    archive.write_bytes(_packed(folder))
    unpack(archive, place / "unpacked", WORKSPACE_LIMITS)
    return place / "unpacked"


def _names(folder: Path) -> set[str]:
    """All files and links, and folders with a slash behind them when they are empty."""
    return {
        path.relative_to(folder).as_posix() + ("/" if path.is_dir() and not path.is_symlink() else "")
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


# ---- what travels ---------------------------------------------------------------------------------------


def test_files_folders_links_and_the_right_to_execute_travel(source: Path, tmp_path: Path) -> None:
    _fill(source, {"train.py": "print(1)\n", "lib/model.py": "", "run.sh": "#!/bin/sh\n", "ünïcode/ß.txt": "ß"})
    (source / "run.sh").chmod(0o700)
    (source / "empty").mkdir()
    (source / "link").symlink_to("lib/model.py")
    (source / "lib/up").symlink_to("../train.py")
    (source / "folder").symlink_to("lib")
    (source / "absolute").symlink_to(source / "lib/model.py")
    there = _travel(source, tmp_path)
    assert _names(there) == {
        *("train.py", "lib/model.py", "run.sh", "ünïcode/ß.txt", "empty/"),
        *("link", "lib/up", "folder", "absolute"),
    }
    assert (there / "train.py").read_text() == "print(1)\n"
    assert stat.S_IMODE((there / "run.sh").stat().st_mode) & 0o777 == 0o755 & ~_umask()
    assert not (there / "train.py").stat().st_mode & 0o111
    assert (there / "lib/up").read_text() == "print(1)\n"
    assert (there / "absolute").readlink() == Path("lib/model.py")
    assert (there / "folder/model.py").exists()


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


def test_the_same_content_is_the_same_file(source: Path, tmp_path: Path) -> None:
    files = {"b.py": "2", "a.py": "1", "c/d.py": "3"}
    _fill(source, files)
    other = _fill(tmp_path / "other", dict(reversed(files.items())))
    os.utime(other / "a.py", (1, 1))
    (other / "b.py").chmod(0o640)
    assert _packed(source) == _packed(other)
    (other / "b.py").write_text("4")
    assert _packed(source) != _packed(other)


def test_what_nobody_needs_is_left_out(source: Path, tmp_path: Path) -> None:
    _fill(source, {".git/config": "", "a.py": "", "__pycache__/a.pyc": "", "sub/.git": "gitdir: x", "sub/b.py": ""})
    assert _names(_travel(source, tmp_path)) == {"a.py", "sub/b.py"}


def test_virtual_environments_are_left_out(source: Path, tmp_path: Path) -> None:
    _fill(source, {"train.py": "", "env/notes.txt": "", ".venv/bin/activate": "", "tools/py3/pyvenv.cfg": ""})
    (source / ".venv/pyvenv.cfg").touch()
    (source / ".venv/bin/python").symlink_to(sys.executable)  # leads out of the workspace
    with pack(source) as file, zipfile.ZipFile(file) as archive:
        assert archive.namelist() == ["env/notes.txt", "train.py"]


# ---- .gitignore -----------------------------------------------------------------------------------------

IGNORE_FILES = {
    ".gitignore": "*.log\n!keep.log\n/build/\n# a comment\ndata/*\n!data/small/\n*.tmp\n\\#odd\ntrailing\\ \n**/deep/**\n",
    "sub/.gitignore": "*.txt\n!important.log\n/only-here\n!x.tmp\n",
    "sub/deeper/.gitignore": "!*.txt\n",
}
TREE = [
    *("a.py", "x.log", "keep.log", "build/out", "sub/build/out", "data/big.bin", "data/small/one.csv", "#odd"),
    *("trailing ", "sub/note.txt", "sub/important.log", "sub/x.tmp", "sub/deeper/note.txt", "sub/only-here"),
    *(
        "sub/deeper/only-here",
        "build2",
        "data/.gitignore",
        "some/deep/thing",
        "deep/thing",
        "x.tmp",
        "sub/deeper/y.log",
    ),
]


def test_gitignore_files_are_read_as_git_reads_them(source: Path, tmp_path: Path) -> None:
    _fill(source, {**{name: "" for name in TREE if not name.endswith(".gitignore")}, **IGNORE_FILES})
    _git(source, "init", "--quiet")
    listed = _git(source, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    assert _names(_travel(source, tmp_path)) == set(listed) - {""}


SEGMENT = st.sampled_from(["a", "b", "a.txt", "b.txt", "c"])
PATH = st.lists(SEGMENT, min_size=1, max_size=3).map("/".join)
PATTERN = st.builds(
    lambda negate, anchor, parts, folder: f"{negate}{anchor}{'/'.join(parts)}{folder}",
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(st.sampled_from(["a", "b", "*", "*.txt", "**", "c"]), min_size=1, max_size=2),
    st.sampled_from(["", "/"]),
)
RULES = st.lists(PATTERN, max_size=4).map("\n".join)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.sets(PATH, max_size=8), rules=RULES, below=RULES)
def test_whatever_the_rules_git_would_list_the_same(
    tmp_path_factory: pytest.TempPathFactory, paths: set[str], rules: str, below: str
) -> None:
    folder = tmp_path_factory.mktemp("rules")
    source = folder / "source"
    source.mkdir()
    for path in sorted(paths):
        if not any(other.startswith(f"{path}/") for other in paths):
            _fill(source, {path: ""})
    _fill(source, {".gitignore": rules})
    if (source / "a").is_dir():
        _fill(source, {"a/.gitignore": below})
    _git(source, "init", "--quiet")
    listed = _git(source, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    assert {name for name in _names(_travel(source, folder)) if not name.endswith("/")} == set(listed) - {""}


def test_rules_of_the_repository_around_it_count(source: Path, tmp_path: Path) -> None:
    _fill(
        source, {".git/config": "", ".gitignore": "*.log\n/job/data\n", "job/a.py": "", "job/b.log": "", "job/data": ""}
    )
    assert _names(_travel(source / "job", tmp_path)) == {"a.py"}


def test_who_names_an_ignored_folder_gets_it(source: Path, tmp_path: Path) -> None:
    _fill(source, {".git/config": "", ".gitignore": "build/\n", "build/a.py": ""})
    assert _names(_travel(source / "build", tmp_path)) == {"a.py"}


def _git(folder: Path, *words: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(
        ["git", "-c", "core.quotepath=off", *words],
        cwd=folder,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["../outside", "/etc/passwd", "sub/../../outside", ".."])
def test_links_that_lead_out_are_refused(source: Path, target: str) -> None:
    (source / "sub").mkdir()
    (source / "link").symlink_to(target)
    with pytest.raises(WorkspaceError, match=r"the link link to .* which leads out of it\. Name .*\.gitignore"):
        pack(source)
    _fill(source, {".gitignore": "link"})
    pack(source).close()


def test_a_link_through_a_link_that_leads_out_is_refused(source: Path) -> None:
    (source / "a/b").mkdir(parents=True)
    (source / "up").symlink_to("a/b")
    (source / "a/b/out").symlink_to("../../..")
    with pytest.raises(WorkspaceError, match=r"a/b/out to \.\./\.\./\.\."):
        pack(source)


def test_sockets_and_pipes_are_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(WorkspaceError, match="holds pipe, which is neither"):
        pack(source)
    (source / "pipe").unlink()
    monkeypatch.chdir(source)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with pytest.raises(WorkspaceError, match="holds socket, which is neither"):
            pack(source)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(WorkspaceError, match=f"{name}' is not a folder"):
            pack(tmp_path / name)


def test_a_name_that_is_no_text_is_refused(source: Path) -> None:
    _fill(source, {"a.py": ""})
    name = os.fsdecode(b"broken-\xff")
    (source / name).touch()
    with pytest.raises(WorkspaceError, match="not UTF-8"):
        pack(source)


def test_too_much_is_refused_and_the_largest_are_named(source: Path) -> None:
    _fill(source, {"small.py": "x", "data/large.bin": "x" * 5_000, "data/medium.bin": "x" * 2_000})
    with pytest.raises(WorkspaceError) as refusal:
        pack(source, replace(WORKSPACE_LIMITS, bytes=6_000))
    text = str(refusal.value)
    assert "has 6.837 KiB, over the limit of 5.859 KiB" in text
    assert "the largest are data/large.bin (4.883 KiB), data/medium.bin (1.953 KiB), small.py" in text
    assert f"in {source}/.gitignore" in text


def test_too_many_are_refused_and_the_crowded_folders_are_named(source: Path) -> None:
    _fill(source, {f"many/{number}": "" for number in range(30)} | {"few/1": "", "a": ""})
    with pytest.raises(WorkspaceError, match=r"more than 20 files; most are in many \(30\), a \(1\), few \(1\)"):
        pack(source, replace(WORKSPACE_LIMITS, files=20))
    with pytest.raises(WorkspaceError, match=r"more than 2 files; most are in"):
        pack(source, replace(WORKSPACE_LIMITS, files=2))


def test_what_does_not_get_smaller_is_refused_by_its_packed_size(source: Path) -> None:
    (source / "random").write_bytes(os.urandom(50_000))
    with pytest.raises(WorkspaceError, match=r"when packed, over the limit of 9\.766 KiB; the largest are random"):
        pack(source, replace(WORKSPACE_LIMITS, archive_bytes=10_000))


def test_what_would_look_like_a_trap_is_refused_here_already(source: Path) -> None:
    (source / "zeros").write_bytes(bytes(2_000_000))
    with pytest.raises(WorkspaceError, match=r"over the limit of 200 to 1 .*; the largest are zeros"):
        pack(source, replace(WORKSPACE_LIMITS, free_bytes=1_000_000))
    pack(source).close()
