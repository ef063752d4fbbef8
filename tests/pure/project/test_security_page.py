"""Each promise of docs/security.md names the test that tries it, and what rests on trust alone says so."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PAGE = (_ROOT / "docs/security.md").read_text(encoding="utf-8")
_TEST = r"`tests/[\w/]+\.py(?:::\w+)?`"
_NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", _PAGE)))
_TRUST = "(no test: a matter of trust)"
_ENDS = re.compile(rf"(?:{_TEST}\)|{re.escape(_TRUST)})\.$")


@pytest.mark.parametrize("named", _NAMED)
def test_the_tests_that_it_names_exist(named: str) -> None:
    path, _, function = named.partition("::")
    tree = ast.parse((_ROOT / path).read_text(encoding="utf-8"))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert function in functions if function else any(each.startswith("test_") for each in functions)


def test_every_row_names_one() -> None:
    rows = [line for line in _PAGE.splitlines() if line.startswith("| ") and "| tried by |" not in line]
    assert len(rows) > 20
    assert [line for line in rows if "`tests/" not in line.rsplit(" | ", 1)[1]] == []


def _statements(text: str) -> list[str]:
    """Its paragraphs and the items of its lists, each on one line."""
    parts = re.split(r"\n\n|\n(?=- )", text)
    return [" ".join(part.split()) for part in parts if part.strip() and not part.lstrip().startswith(("#", "|"))]


def test_every_statement_ends_with_its_tests_or_says_that_it_is_a_matter_of_trust() -> None:
    statements = _statements(_PAGE)
    assert len(statements) > 15
    assert [each for each in statements if not _ENDS.search(each)] == []


def _unmarked(statement: str) -> list[str]:
    """Its sentences of which no test is named, and that do not say that there is none."""
    sentences = re.split(r"(?<=[.])\s+(?=[A-Z`])", re.sub(r"\*\*.*?\.\*\*", "", statement).removeprefix("- ").strip())
    return [each for each in sentences if not re.search(_TEST, each) and _TRUST not in each]


def test_each_sentence_of_what_is_not_promised_names_a_test_or_says_that_there_is_none() -> None:
    statements = _statements(_PAGE.partition("## What is not promised")[2])
    unmarked = [each for statement in statements for each in _unmarked(statement)]
    assert [each for each in unmarked if not each.startswith("Give ")] == []  # which is advice
