"""What README, docs and the packages' pages link to and name is there: files, headings, modules, classes, functions."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_FOLDERS = ("docs", "changelog.d", "fluster", "bus", "services", "benchmarks", "examples", "tests")
_CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)<>\s]+)>?\s*\)")

_PAGES = sorted([*_ROOT.glob("*.md"), *(page for folder in _FOLDERS for page in (_ROOT / folder).rglob("*.md"))])


def _name(path: Path) -> str:
    return path.relative_to(_ROOT).as_posix()


def _links(page: Path) -> list[tuple[int, str]]:
    """Line and target of each link to a file of the project or to a heading."""
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "-", code.group()), page.read_text(encoding="utf-8"))
    return [
        (text.count("\n", 0, match.start()) + 1, match[1])
        for match in _LINK.finditer(text)
        if not re.match(r"[a-z]+:", match[1])
    ]


@functools.cache
def _anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        anchor = plain
        while anchor in anchors:
            number += 1
            anchor = f"{plain}-{number}"
        anchors.add(anchor)
    return frozenset(anchors)


def _broken(page: Path, target: str) -> str | None:
    """What is wrong with a link of the page, if anything is."""
    path, _, anchor = target.partition("#")
    linked = (page.parent / path).resolve() if path else page
    if not linked.exists():
        return "there is no such file"
    if anchor and linked.suffix == ".md" and anchor not in _anchors(linked):
        return f"{_name(linked)} has no such heading"
    return None


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_each_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = [
        f"{_name(page)}:{line}: {target}: {why}" for line, target in _links(page) if (why := _broken(page, target))
    ]
    assert broken == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `list`, twice\n\n# A list twice\n\n[x](#a-list-twice-1) `[x](none.md)`\n\n[y](none.md)\n")
    assert _links(page) == [(5, "#a-list-twice-1"), (7, "none.md")]
    assert [_broken(page, target) for _, target in _links(page)] == [None, "there is no such file"]


def _rows() -> list[tuple[str, list[Path], list[str]]]:
    """The rows of "Where to find things": the question, the linked files, and the names to look for in them."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Where to find things")[2].partition("\n## ")[0]
    rows = []
    for line in table.splitlines():
        if line.startswith("| ") and "](" in line:
            question, files, names = (cell.strip() for cell in line.strip("|").split(" | "))
            linked = [_ROOT / target for target in _LINK.findall(files)]
            rows.append((question, linked, re.findall(r"`([\w.]+)`", names)))
    assert rows, "CONTRIBUTING.md has no table of where to find things"
    return rows


@pytest.mark.parametrize(("question", "files", "names"), _rows(), ids=[row[0] for row in _rows()])
def test_the_functions_for_a_question_are_in_the_files_for_it(
    question: str, files: list[Path], names: list[str]
) -> None:
    assert files, f"{question!r} links to no file"
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    missing = [
        name
        for name in names
        for part in name.split(".")
        if not re.search(rf"^ *(?:async )?(?:def|class) {part}\b|^{part}\b", text, re.MULTILINE)
    ]
    assert missing == [], f"{question!r}: {', '.join(map(_name, files))} define none of these"


_ABOUT_CODE = [
    page
    for page in _PAGES
    if (page.name == "README.md" and page.relative_to(_ROOT).parts[0] in ("fluster", "bus", "services"))
    or page in (_ROOT / "CONTRIBUTING.md", _ROOT / "docs/architecture.md", _ROOT / "docs/glossary.md")
]


@functools.cache
def _words_of_the_code() -> frozenset[str]:
    """Every word of the sources, and of the files that say how they are built and tested."""
    sources = [path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in (*sources, _ROOT / "pyproject.toml", _ROOT / "Makefile")]
    names = {part for path in sources for part in path.relative_to(_ROOT).with_suffix("").parts}
    return frozenset(names.union(*(re.findall(r"\w+", text) for text in texts)))


@pytest.mark.parametrize("page", _ABOUT_CODE, ids=_name)
def test_the_names_in_pages_about_the_code_are_in_the_code(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", text)
    unknown = [name for name in named if not _words_of_the_code().issuperset(filter(None, name.split(".")))]
    assert unknown == [], f"{_name(page)} names what is nowhere in the code"
