"""Each promise of docs/security.md names the test that tries it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_NAMED = sorted(
    set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", (_ROOT / "docs/security.md").read_text(encoding="utf-8")))
)


@pytest.mark.parametrize("named", _NAMED)
def test_the_tests_that_it_names_exist(named: str) -> None:
    path, _, function = named.partition("::")
    tree = ast.parse((_ROOT / path).read_text(encoding="utf-8"))
    functions = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert function in functions if function else any(each.startswith("test_") for each in functions)


def test_every_row_names_one() -> None:
    page = (_ROOT / "docs/security.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| tried by |" not in line]
    assert len(rows) > 20
    assert [line for line in rows if "`tests/" not in line.rsplit(" | ", 1)[1]] == []
