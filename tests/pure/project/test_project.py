"""Guards: rules about the project's own files, which no compiler keeps."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SUBJECTS = [ROOT / f"bus/fluster_bus/core/{name}.py" for name in ("subjects", "buckets", "server_subjects")]

# What follows the namespace in a subject.
_AREAS = "jobs|ensure|endpoints|watch|actors|logs|events|workers|heartbeats|capacity|dispatch"
_MODULES = {path.stem for path in (ROOT / "fluster").iterdir() if path.is_dir() or path.suffix == ".py"}


def _spells_a_subject(text: str) -> bool:
    """Whether a string is a subject or begins one; `{}` stands for what an f-string fills in."""
    if re.match(r"\$(JS|KV|SRV|SYS|O)\.", text):
        return True
    if re.match(r"fluster\.($|\{\}|\*|>|sys(\.|$))", text):
        return True
    if re.match(rf"\{{\}}\.(\{{\}}|\*|sys)\.({_AREAS})(\.|$)", text):
        return True
    # A module's path looks much the same: "fluster.cluster.jobs".
    named = re.match(rf"fluster\.([\w-]+)\.({_AREAS})(\.|$)", text)
    return named is not None and named[1] not in _MODULES


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string in the code, f-strings as one and docstrings left out."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inside.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            yield (
                node.lineno,
                "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values),
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value


@pytest.mark.parametrize(
    "source",
    [
        "'fluster.default.jobs.submit'",
        "'fluster.*.endpoints.lookup'",
        "'fluster.sys.heartbeats.*'",
        "'fluster.' + namespace",
        "f'fluster.{namespace}.ensure'",
        "f'{root}.{namespace}.actors.{name}.any'",
        "f'$KV.{bucket}.{key}'",
        "'$JS.API.>'",
        "'$SRV.PING'",
    ],
)
def test_the_guard_knows_a_subject(source: str) -> None:
    (found,) = [text for _, text in _strings(ast.parse(f"x = {source}"))]
    assert _spells_a_subject(found)


@pytest.mark.parametrize(
    "source",
    [
        "'fluster.cli'",
        "'fluster.cluster.jobs'",
        "'fluster_services.controller'",
        "f'fluster.cli.{command}'",
        "f'fluster {command}'",
        "f'{job}.{task}'",
        "'fluster.dev'",
    ],
)
def test_the_guard_lets_module_names_and_keys_pass(source: str) -> None:
    (found,) = [text for _, text in _strings(ast.parse(f"x = {source}"))]
    assert not _spells_a_subject(found)


def test_subjects_are_spelled_in_three_modules() -> None:
    spelled = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for folder in ("bus", "fluster", "services")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path not in SUBJECTS
        for line, text in _strings(ast.parse(path.read_text(encoding="utf-8")))
        if _spells_a_subject(text)
    ]
    assert not spelled, "build subjects with fluster_bus.core.subjects, buckets or server_subjects:\n" + "\n".join(
        spelled
    )


_REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("path", _REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_are_pinned_and_hashed_and_name_no_host(path: Path) -> None:
    allowed = re.compile(
        r"#.*"
        r"|[a-z0-9-]+==[\w.+]+( ; [\w. '!=<>()]+)? \\"
        r"|    --hash=sha256:[0-9a-f]{64}( \\)?"
    )  # fmt: skip
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not allowed.fullmatch(line)] == []
    assert not [line for line in lines if "://" in line]


def test_requirements_hold_what_pyproject_asks_for() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    core = pyproject["project"]["dependencies"]
    local = pyproject["project"]["optional-dependencies"]["local"]
    build = pyproject["dependency-groups"]["build"]
    integrations = pyproject["dependency-groups"]["integrations"]
    dev = [entry for entry in pyproject["dependency-groups"]["dev"] if isinstance(entry, str)]
    files = {"local": core + local, "build": build, "dev": core + local + build + dev, "integrations": integrations}
    files["types"] = pyproject["dependency-groups"]["types"]
    for name, wanted in files.items():
        text = (ROOT / f"requirements/{name}.txt").read_text(encoding="utf-8")
        locked = set(re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE))
        missing = {re.split(r"[^\w-]", entry, maxsplit=1)[0] for entry in wanted} - locked
        assert not missing, f"requirements/{name}.txt lacks {missing}: run `make lock`"


def test_the_import_contracts_stand() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [contract for contract in linter["contracts"] if contract["type"] == "layers"]
    within = {container: contract for contract in layers for container in contract.get("containers", [])}
    forbidden = [
        (contract["source_modules"], contract["forbidden_modules"])
        for contract in linter["contracts"]
        if contract["type"] == "forbidden"
    ]
    assert [each["layers"] for each in layers if "containers" not in each] == [
        ["fluster_services", "fluster", "fluster_bus"]
    ]
    assert set(within) == {
        "fluster_bus",
        "fluster.actors",
        "fluster.cli",
        "fluster.cluster",
        "fluster_services.controller",
        "fluster_services.worker",
    }
    assert all(contract["exhaustive"] for contract in within.values())  # so that a new folder is given its place
    assert (["fluster", "fluster_services"], ["nats"]) in forbidden
    assert (["fluster.cluster"], ["fluster.actors", "fluster.worker_pool"]) in forbidden


def test_the_python_for_pyenv_and_uv_is_3_12() -> None:
    assert (ROOT / ".python-version").read_text(encoding="utf-8").split() == ["3.12"]


def test_each_decision_has_a_number_of_its_own() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs/decisions").glob("*.md")}
    numbers = [name[:4] for name in texts]
    assert {number for number in numbers if numbers.count(number) > 1} == set()
    assert [name for name, text in texts.items() if not text.startswith(f"# {int(name[:4])}. ")] == []
