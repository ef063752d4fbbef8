"""What decides which environment a job gets, and the error of a job that cannot have one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fluster_bus.messages import Entrypoint, EnvironmentConfig, JobRequest, Namespace
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import SecretStore
from fluster_services.config import WorkerLimits
from fluster_services.worker.attempts.preparation import (
    Preparation,
    PythonMismatchError,
    _check_pickled_by,
    _check_python,
)
from fluster_services.worker.contract.faults import BuildError, BuildOutput, LaunchError
from fluster_services.worker.environments.environments import (
    _PLAIN,
    Recipe,
    _read_lock,
    wants_environment,
)
from fluster_services.worker.environments.interpreters import without_interpreters_own

T = TypeVar("T")


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.mark.parametrize(
    "line",
    [
        "numpy",
        "numpy>=2,<3",
        "ruamel.yaml[jinja2] ~= 0.18 ; python_version < '3.13'",
        "zope_interface (==5)",
        "torch @ https://example.com/torch.whl",
        "# a comment",
        "",
        "numpy  # a comment",
    ],
)
def test_requirements_that_say_all_by_themselves(line: str) -> None:
    assert _PLAIN.fullmatch(line)


@pytest.mark.parametrize(
    "line",
    [
        "./wheels/a.whl",
        "../a",
        "/abs/a.whl",
        "-e .",
        "-r other.txt",
        "--find-links wheels",
        "wheels/a.whl",
        ".",
        "a @ file:///a.whl",
        "a @ ./a.whl",
    ],
)
def test_requirements_that_may_speak_of_files(line: str) -> None:
    assert not _PLAIN.fullmatch(line)


def test_every_part_of_a_recipe_makes_another_environment() -> None:
    recipe = {"python": None, "requirements": "a", "lock": None, "workspace": None, "overlay": "", "made_with": "x"}
    names = {Recipe(**{**recipe, field: "other"}).name() for field in recipe}  # type: ignore[arg-type]
    assert len(names | {Recipe(**recipe).name()}) == len(recipe) + 1  # type: ignore[arg-type]
    assert Recipe(**recipe).name() == Recipe(**recipe).name()  # type: ignore[arg-type]


def test_who_wants_an_environment() -> None:
    assert not wants_environment(EnvironmentConfig(workspace=".", env_vars={"A": "b"}))
    for config in (
        EnvironmentConfig(pip_packages=("a",)),
        EnvironmentConfig(requirements="a"),
        EnvironmentConfig(python="3.12"),
        EnvironmentConfig(workspace=".", uv_lock=True),
    ):
        assert wants_environment(config)


def test_what_belongs_to_an_interpreter_is_told_from_the_users_own() -> None:
    own = ["/home/me/code", "/work/site-packages-of-mine", "/srv/python3.12-things"]
    interpreters = ["/usr/lib/python3.12", "/usr/lib/python3.12/lib-dynload", "/usr/lib/python312.zip"]
    packages = ["/usr/lib/python3/dist-packages", "/venv/lib/python3.12/site-packages"]
    assert without_interpreters_own([*interpreters, *own, *packages]) == own
    assert not set(sys.path) & {path for path in without_interpreters_own(sys.path) if "python3" in Path(path).name}


@pytest.mark.parametrize(
    ("source", "lies_there"),
    [
        ('{ registry = "https://packages.example/simple" }', False),
        ('{ virtual = "." }', False),
        ('{ editable = "." }', False),
        ('{ editable = "packages/one" }', True),
        ('{ directory = "../beside" }', True),
        ('{ path = "wheels/a.whl" }', True),
    ],
)
def test_locks_that_speak_of_files_of_the_workspace(tmp_path: Path, source: str, lies_there: bool) -> None:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "uv.lock").write_text(f'[[package]]\nname = "a"\nsource = {source}\n')
    assert _read_lock(tmp_path)[1] is lies_there


def test_a_lock_that_is_not_there_or_broken_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="needs a workspace"):
        _read_lock(None)
    with pytest.raises(BuildError, match=r"no pyproject.toml: run `uv lock`"):
        _read_lock(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "uv.lock").write_text("not = = toml")
    with pytest.raises(BuildError, match="cannot be read"):
        _read_lock(tmp_path)


def test_the_reason_of_a_failed_build_is_bounded() -> None:
    output = BuildOutput()
    output.begin("uv one")
    output.add("of the first")
    output.begin("uv two")
    assert output.last_words() == ""
    for number in range(2_000):
        output.add(f"{number} " + "x" * 500)
    assert len(output.lines) == 500
    assert len(output.last_words()) == 4_000
    assert output.last_words().splitlines()[-1].startswith("1999 ")


def test_what_was_said_since_is_told_with_how_much_is_not_kept() -> None:
    output = BuildOutput()
    output.add("first")
    output.add("\x1b[91msecond\x1b[0m")
    assert ([text for _time, text in output.since(0)[0]], output.since(0)[1]) == (["first", "second"], 0)
    assert [text for _time, text in output.since(1)[0]] == ["second"]
    assert output.since(2) == ([], 0)
    for number in range(600):
        output.add(str(number))
    lines, left_out = output.since(2)
    assert (lines[0][1], lines[-1][1], left_out) == ("100", "599", 100)


# ---- what is refused --------------------------------------------------------------------------------------


def _request(**environment: Any) -> JobRequest:
    return JobRequest(name="job", entrypoint=Entrypoint(callable=print), environment=EnvironmentConfig(**environment))


def _no_store(namespace: Namespace) -> ObjectStore:
    raise AssertionError(f"nobody should ask the store of {namespace}")


def _no_secrets(namespace: Namespace) -> SecretStore:
    raise AssertionError(f"nobody should ask the store of {namespace}")


def _nobody_listens(_output: BuildOutput) -> None:
    """The output of a build does not matter here."""


def test_a_folder_that_was_not_packed_is_told(tmp_path: Path) -> None:
    preparation = Preparation(tmp_path, _no_store, _no_secrets, WorkerLimits())
    with pytest.raises(LaunchError, match="workspace='/src' is a folder of the client, which was not packed"):
        _run(preparation.prepare(Namespace("default"), _request(workspace="/src"), "key", _nobody_listens))


def test_callables_need_the_pythons_that_they_were_pickled_by() -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    _check_python(_request(), "image 'a'", own)
    with pytest.raises(
        PythonMismatchError, match=rf"image 'a' is Python 3\.4 .*this worker's is {own}.* name a Python {own}"
    ):
        _check_python(_request(), "image 'a'", "3.4")
    pickled = Entrypoint.model_validate({"pickled": b"x", "python": "3.4"})
    with pytest.raises(PythonMismatchError, match=r"pickled by Python 3\.4"):
        _check_pickled_by(JobRequest(name="job", entrypoint=pickled))
    unknown = Entrypoint.model_validate({"pickled": b"x"})
    _check_pickled_by(JobRequest(name="job", entrypoint=unknown))
    command = Entrypoint(command=("true",))
    _check_python(JobRequest(name="job", entrypoint=command), "image 'a'", "3.4")
