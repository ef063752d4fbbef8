"""What users read is plain technical English: docs, help and the texts of errors and logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("fluster", "bus/fluster_bus", "services/fluster_services")
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
# The user of that name, in the recipe of images.
_LEFT_OUT = {"services/fluster_services/worker/images/image_recipe.py"}


def _pages() -> list[Path]:
    decisions = _ROOT / "docs" / "decisions"
    pages = [_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    for folder in ("docs", "changelog.d", *_PACKAGES):
        pages += (_ROOT / folder).rglob("*.md")
    return sorted(page for page in pages if decisions not in page.parents)


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(_ROOT)))
def test_a_page_has_none_of_the_worst_words(page: Path) -> None:
    text = _CODE.sub(lambda code: re.sub(r"[^\n]", "-", code.group()), page.read_text())
    found = [(text.count("\n", 0, match.start()) + 1, match.group()) for match in _WORSE.finditer(text)]
    assert found == []


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """All texts of a module but its docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("package", _PACKAGES)
def test_errors_logs_and_options_have_none_of_the_worst_words(package: str) -> None:
    files = {str(path.relative_to(_ROOT)): path for path in sorted((_ROOT / package).rglob("*.py"))}
    assert files
    found = [
        f"{name}:{line}: {text[:100]!r}"
        for name, path in files.items()
        if name not in _LEFT_OUT
        for line, text in _messages(ast.parse(path.read_text()))
        if text not in _NAMES and _WORSE.search(text)
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
