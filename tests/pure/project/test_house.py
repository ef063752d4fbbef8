"""The layout of the code: folders that can be looked over, each with a page that says what it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_PACKAGES = ("fluster", "bus/fluster_bus", "services/fluster_services")
_MOST_MODULES = 15
_MOST_LINES = 450  # of a module
_FEW_LINES, _MOST_SMALL = 100, 100  # so many modules, `__init__.py` included, may have fewer lines
_SINGLE_PAGE = ("fluster", "fluster/testing")  # their pages are the README and the docs

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


def test_modules_are_neither_long_nor_many_and_small() -> None:
    lines = {
        _name(path): len(path.read_text(encoding="utf-8").splitlines())
        for folder in _FOLDERS
        for path in folder.glob("*.py")
    }
    assert {name: count for name, count in lines.items() if count > _MOST_LINES} == {}, "divide them"
    small = sorted((count, name) for name, count in lines.items() if count < _FEW_LINES)
    assert len(small) <= _MOST_SMALL, f"join those that change together: {small}"


# Of the picture in CONTRIBUTING: {subgraph: the package that it shows, and whether it shows all of its folders}
_SHOWN = {
    "S": ("services/fluster_services", False),
    "C": ("services/fluster_services/controller", True),
    "W": ("services/fluster_services/worker", True),
    "F": ("fluster", False),
    "A": ("fluster/actors", True),
    "L": ("fluster/cluster", True),
    "B": ("bus/fluster_bus", True),
}


def _picture() -> tuple[dict[str, set[str]], list[tuple[str, str, str]]]:
    """The folders that the picture shows in each package, and its arrows with the package they are in."""
    text = (_ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown: dict[str, set[str]] = {package: set() for package, _ in _SHOWN.values()}
    arrows: list[tuple[str, str, str]] = []
    labels = dict(re.findall(r"(\w+)\[\"(\w+)\"\]", text))
    within: list[str] = []
    for line in text.partition("```mermaid\nflowchart TD\n")[2].partition("```")[0].splitlines():
        words = line.split()
        if words[0] == "subgraph":
            within.append(_SHOWN[words[1].partition("[")[0]][0])
        elif words[0] == "end":
            within.pop()
        elif within and "---" not in words:
            names = [labels.get(name, name) for name in (each.partition("[")[0] for each in words[::2])]
            shown[within[-1]].update(names)
            arrows += [(within[-1], *names)] if len(names) == 2 else []
    return shown, arrows


@pytest.mark.parametrize(("package", "is_whole"), _SHOWN.values(), ids=[package for package, _ in _SHOWN.values()])
def test_the_picture_shows_the_folders_that_there_are(package: str, is_whole: bool) -> None:
    folders = {path.parent.name for path in (_ROOT / package).glob("*/*.py")}
    shown, _ = _picture()
    assert shown[package] <= folders, f"CONTRIBUTING.md shows what is not a folder of {package}"
    assert not is_whole or shown[package] == folders, f"CONTRIBUTING.md does not show all folders of {package}"


def test_each_arrow_of_the_picture_is_an_import() -> None:
    _, arrows = _picture()
    unfounded = [
        f"{package}: {importer} --> {imported}"
        for package, importer, imported in arrows
        if not any(
            f"{_dotted(package)}.{imported}" in path.read_text(encoding="utf-8")
            for path in (_ROOT / package / importer).rglob("*.py")
        )
    ]
    assert arrows
    assert unfounded == []


def _dotted(package: str) -> str:
    return package.removeprefix("bus/").removeprefix("services/").replace("/", ".")


@pytest.mark.parametrize("package", _PACKAGES)
def test_public_classes_have_names_of_their_own(package: str) -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((_ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(_name(path))
    assert places
    double = {name: found for name, found in places.items() if len(found) > 1}
    # joblib shows its users this name, and finds it by a rule of its own; Zephyr's users name theirs.
    assert double.pop("FlusterBackend", []) == (
        ["fluster/integrations/joblib.py", "fluster/integrations/zephyr.py"] if package == "fluster" else []
    )
    assert double == {}


@pytest.mark.parametrize("package", _PACKAGES)
def test_modules_have_names_of_their_own_in_each_part_of_a_package(package: str) -> None:
    places: dict[tuple[str, str], list[str]] = {}
    for path in sorted((_ROOT / package).rglob("*.py")):
        part = path.relative_to(_ROOT / package).parts[0]
        if not path.name.startswith("__") and part not in (
            "cli",
            path.name,
        ):  # the command line's are named as its verbs are
            places.setdefault((part, path.name), []).append(_name(path))
    assert places
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_tests_look_into_private_parts_at_few_places_and_say_why() -> None:
    """Ruff asks for the remark (SLF001); a test that goes by what users see needs none."""
    places = [
        f"{_name(path)}:{number}: {line.partition('# noqa: ')[2]}"
        for path in sorted((_ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"# noqa: .*SLF" + "001", line)
    ]
    assert [place for place in places if " - " not in place] == [], "say why"
    assert len(places) < 60, "\n".join(places)


def test_any_does_not_grow() -> None:
    """`Any` is for what users hand in and get back, and for libraries that have no types: what only passes through is an
    object, what is read from JSON a JsonObject. Lower the bar with the number.
    """
    places = [
        f"{_name(path)}:{node.lineno}"
        for package in _PACKAGES
        for path in sorted((_ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert places
    assert len(places) < 300, "\n".join(places)
