"""The parts of the demo that need no cluster."""

from collections import Counter
from pathlib import Path

import pytest

from fluster import demo as stdlib_index
from fluster.demo import Shard, parse, ranking, shard_of, standard_library


def _file(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def test_names_definitions_and_lines_are_counted(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        "a.py",
        b"import os.path as p\n\nclass A:\n    def f(self, x):\n        return self.g(x, k=os, **x)\n",
    )
    counts, postings = parse([path])
    assert counts == Counter(files=1, lines=5, definitions=2)
    assert {name: files[path] for name, files in postings.items()} == {
        "os.path": 1, "A": 1, "f": 1, "self": 2, "x": 3, "g": 1, "k": 1, "os": 1, "**": 1,
    }  # fmt: skip


def test_a_file_is_read_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.py", "# -*- coding: latin-1 -*-\nmüde = 1\n".encode("latin-1"))
    assert "müde" in parse([path])[1]


@pytest.mark.parametrize(
    "content",
    [b"def f(:\n", b"\xff\xfe\x00", b"# coding: klingon\nx = 1\n", b"x = '\x00'\n", b"x = " + b"(" * 5_000],
)
def test_what_does_not_parse_is_counted(tmp_path: Path, content: bytes) -> None:
    assert parse([_file(tmp_path, "bad.py", content)]) == (Counter({"files": 1, "not parsed": 1}), {})


def test_shards_add_up_to_the_whole(tmp_path: Path) -> None:
    files = [_file(tmp_path, f"{n}.py", f"a{n} = b{n} = c = d = len(a{n})\n".encode() * n) for n in range(1, 30)]
    counts, postings = parse(files)
    whole, shards = Shard(), [Shard() for _ in range(stdlib_index.SHARDS)]
    whole.add(postings)
    for name, uses in postings.items():
        for path, count in uses.items():  # in as many messages as possible
            shards[shard_of(name)].add({name: {path: count}})
    summaries = [shard.summary() for shard in shards]
    assert sum((each for each, _ in summaries), Counter[str]()) == whole.summary()[0]
    assert ranking(dict(entry for _, top in summaries for entry in top), 10) == whole.summary()[1]
    assert shards[shard_of("c")].where("c") == whole.where("c")
    assert whole.where("nowhere") == []
    assert counts["files"] == 29


def test_one_use_more_changes_the_checksum() -> None:
    one, other = Shard(), Shard()
    one.add({"a": {"x.py": 1}, "b": {"x.py": 2}})
    other.add({"a": {"x.py": 2}, "b": {"x.py": 1}})
    assert one.summary() != other.summary()


def test_the_most_used_come_first_and_ties_by_name() -> None:
    assert ranking({"b": 2, "a": 2, "c": 9}) == [("c", 9), ("a", 2), ("b", 2)]


def test_the_standard_library_has_each_file_once_and_nothing_installed() -> None:
    files = standard_library()
    assert len(files) == len(set(files)) > 500
    assert files == sorted(files)
    assert not [path for path in files if "site-packages" in path or "dist-packages" in path]
    assert [path for path in files if path.endswith("/tokenize.py")]
