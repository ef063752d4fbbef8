"""The layout of the code: folders that can be looked over, each with a page that says what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("fluster", "bus/fluster_bus", "services/fluster_services")
_MOST_MODULES = 15
_SINGLE_PAGE = ("fluster", "fluster/demo", "fluster/testing")  # their pages are the README and the docs

_FOLDERS = sorted(
    folder
    for package in _PACKAGES
    for folder in (_ROOT / package, *(_ROOT / package).rglob("*"))
    if folder.is_dir() and any(folder.glob("*.py"))
)


def _name(folder: Path) -> str:
    return folder.relative_to(_ROOT).as_posix()


@pytest.mark.parametrize("folder", _FOLDERS, ids=_name)
def test_a_folder_can_be_looked_over(folder: Path) -> None:
    modules = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
    assert len(modules) <= _MOST_MODULES, f"{_name(folder)} has {len(modules)} modules: move some to a sub-package"


@pytest.mark.parametrize("folder", [each for each in _FOLDERS if _name(each) not in _SINGLE_PAGE], ids=_name)
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    page = folder / "README.md"
    assert page.is_file(), f"{_name(folder)} lacks a README.md: what flows through it, its words, where to start"
    text = page.read_text(encoding="utf-8")
    unnamed = [
        path.stem
        for path in folder.glob("*.py")
        if not path.name.startswith("__") and not re.search(rf"`{path.stem}`|\b{path.stem}\.py\b", text)
    ]
    assert not unnamed, f"{_name(page)} does not name these modules: {', '.join(sorted(unnamed))}"
