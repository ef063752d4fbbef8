"""Docs, help, the texts of errors and logs, and what the code says about itself are plain technical English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("fluster", "bus/fluster_bus", "services/fluster_services")
_EXPLAINED = (*_PACKAGES, "tests", "benchmarks", "examples")  # folders whose docstrings and comments are looked at
_WORSE = re.compile(
    r"\b(?:nobody|noone|somebody|anybody|whoever|whomever|shall)\b"
    r"|\b(?:is|are|be|was|were|been) told\b"
    r"|\btell(?:s|ing)? of\b"
    # "there is no room" and "it is no longer there" are English, "it is no folder" is not.
    r"|(?<!\bthere )\b(?:is|are) no\b(?! (?:longer|more)\b)",
    re.IGNORECASE,
)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_NAMES = {"anybody"}  # a token of the subjects of those who need no credentials
_LEFT_OUT = {
    "services/fluster_services/worker/environments/image_recipe.py",  # the user of that name, in the recipe of images
    "tests/pure/project/test_plain_words.py",
}


def _pages() -> list[Path]:
    pages = [_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    for folder in ("docs", "changelog.d", *_PACKAGES):
        pages += (_ROOT / folder).rglob("*.md")
    return sorted(pages)


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(_ROOT)))
def test_a_page_has_none_of_the_worst_words(page: Path) -> None:
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "-", code.group()), page.read_text())
    found = [(text.count("\n", 0, match.start()) + 1, match.group()) for match in _WORSE.finditer(text)]
    assert found == []


def _docstrings(tree: ast.Module) -> list[ast.Constant]:
    """The docstrings of a module, its classes and its functions."""
    first = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body
    ]
    values = [each.value for each in first if isinstance(each, ast.Expr)]
    return [each for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """All texts of a module but its docstrings."""
    docstrings = {id(each) for each in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def _explanations(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of a module's docstrings and comments."""
    yield from ((each.lineno, str(each.value)) for each in _docstrings(ast.parse(source)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _modules(folder: str) -> dict[str, Path]:
    """The modules of a folder by their names, but for those that are left out."""
    named = {path.relative_to(_ROOT).as_posix(): path for path in sorted((_ROOT / folder).rglob("*.py"))}
    assert named
    return {name: path for name, path in named.items() if name not in _LEFT_OUT}


@pytest.mark.parametrize("package", _PACKAGES)
def test_errors_logs_and_options_have_none_of_the_worst_words(package: str) -> None:
    found = [
        f"{name}:{line}: {text[:100]!r}"
        for name, path in _modules(package).items()
        for line, text in _messages(ast.parse(path.read_text()))
        if text not in _NAMES and _WORSE.search(text)
    ]
    assert found == []


@pytest.mark.parametrize("folder", _EXPLAINED)
def test_docstrings_and_comments_have_none_of_the_worst_words(folder: str) -> None:
    found = [
        f"{name}:{line + text.count(chr(10), 0, match.start())}: {match.group()}"
        for name, path in _modules(folder).items()
        for line, text in _explanations(path.read_text())
        for match in _WORSE.finditer(text)
    ]
    assert found == []


def test_descriptions_of_commands_have_none_of_the_worst_words() -> None:
    """Their docstrings are what --help shows."""
    found = [
        f"{path.name}:{node.lineno}: {match.group()}"
        for path in sorted((_ROOT / "fluster" / "cli").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and (match := _WORSE.search(ast.get_docstring(node) or ""))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("there is no room", True),
        ("it is no longer there", True),
        ("it is not a folder", True),
        ("it is no folder", False),
        ("what a task is told", False),
        ("Whoever asks", False),
        ("the log tells of it", False),
    ],
)
def test_the_worst_words_are_found(text: str, is_plain: bool) -> None:
    assert (_WORSE.search(text) is None) is is_plain
