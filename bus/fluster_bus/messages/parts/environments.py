"""What surrounds a task."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from fluster_bus.core.names import masked
from fluster_bus.messages.parts.model import Many, Message, is_carried

MAX_REQUIREMENTS_CHARACTERS = 256 << 10


class EnvironmentConfig(Message):
    """What surrounds the task: the folder it runs in, the packages it finds, environment variables.

    `workspace` is a folder of the client: packed when the job is launched, without .git and what .gitignore names, and
    each task runs in a copy of its own. `cwd` is the folder to run in: a whole path, and then only workers that have that folder run the
    task, or with a workspace a path in it. `pip_packages`, `requirements` (the text of a requirements file) and `uv_lock`
    (the uv.lock in the workspace) are installed into a virtual environment on top of what the worker has, and in containers
    of what the image has. `python` is another interpreter for that: a version or a path, found on the worker, or in the image.
    Without packages, the path of an interpreter, a virtual environment or a conda environment on the worker is used as it is.
    `secrets` names variables whose values are taken from the environment of the program that launches the job. They are in no record, status, event or
    log: workers alone can read them, until the job ends.
    `image` names the container image to run in, at workers that run jobs in containers; for a callable it has to have the
    client's version of Python.
    `mounts` are folders of the worker that the task is to see there: {path in the container: path at the worker}. They can be
    read only, and lie below those that the worker's configuration names.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(hide_input_in_errors=True)  # there may be secrets in it

    workspace: str | Path | None = None
    cwd: str | None = Field(default=None, min_length=1, max_length=4_096)
    bundle: str | None = Field(default=None, pattern=r"\A[0-9a-f]{64}\z")
    """What was made of the workspace: its SHA-256."""
    pip_packages: Many[str] = ()
    requirements: str | None = Field(default=None, max_length=MAX_REQUIREMENTS_CHARACTERS)
    uv_lock: bool = False
    python: str | None = Field(default=None, min_length=1, max_length=4_096)
    env_vars: Mapping[str, str] = Field(default_factory=dict)
    secrets: Many[str] = Field(default=(), max_length=64)
    image: str | None = Field(default=None, pattern=r"\A[A-Za-z0-9][\w.:/@-]*\z", max_length=1_024)
    mounts: Mapping[str, str] = Field(default_factory=dict)

    @field_validator("pip_packages", mode="before")
    @classmethod
    def _no_text(cls, value: object) -> object:
        if isinstance(value, str):
            raise ValueError(f"pip_packages={value!r} is a text: give a list, such as ['numpy>=2', 'rich']")
        return value

    @field_validator("pip_packages")
    @classmethod
    def _check_packages(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for package in value:
            is_plain = package.replace("\t", " ").isprintable() and not package.rstrip().endswith("\\")
            if not package.strip() or package.strip().startswith(("-", "#")) or not is_plain:
                raise ValueError(f"pip_packages has {package!r}: each is one package; options go into `requirements`")
        if sum(map(len, value)) > MAX_REQUIREMENTS_CHARACTERS:
            raise ValueError(f"pip_packages has more than {MAX_REQUIREMENTS_CHARACTERS:,} characters")
        return value

    @field_validator("python")
    @classmethod
    def _check_python(cls, value: str | None) -> str | None:
        if value is not None and (value.startswith("-") or not value.isprintable()):
            raise ValueError(f"python={value!r} is neither a version, such as '3.12', nor the path of an interpreter")
        return value

    @field_validator("mounts")
    @classmethod
    def _check_mounts(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for path in (*value, *value.values()):
            if (
                not path.isprintable()
                or not path.startswith("/")
                or posixpath.normpath(path) != path
                or path[:2] in ("/", "//")
            ):
                raise ValueError(
                    f"mounts has {path!r}: write whole paths, such as '/data/set', without '..' or a '/' at the end"
                )
        return value

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        """What is shown of it: no values of variables that are likely to be secrets."""
        for name, value in super().__repr_args__():
            yield name, masked(value) if name == "env_vars" else value

    @model_validator(mode="after")
    def _check_cwd(self) -> Self:
        if self.cwd is None:
            return self
        if self.image is not None:
            raise ValueError(
                f"cwd={self.cwd!r} and image={self.image!r} exclude each other: a container has no folder of its worker"
            )
        parts, has_copy = self.cwd.split("/"), self.workspace is not None or self.bundle is not None
        if has_copy and (self.cwd.startswith("/") or ".." in parts or not self.cwd.isprintable()):
            raise ValueError(f"cwd={self.cwd!r}: with a workspace, give a path relative to it, such as 'experiments/a'")
        if not has_copy and (not self.cwd.startswith("/") or not self.cwd.isprintable()):
            raise ValueError(
                f"cwd={self.cwd!r}: without a workspace, give the whole path of a folder, such as '/data/run'"
            )
        return self

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Self:
        if self.workspace is not None and self.bundle is not None:
            raise ValueError("give workspace=… or bundle=…, not both: the bundle is a workspace that is stored already")
        if self.uv_lock and self.workspace is None and self.bundle is None:
            raise ValueError("uv_lock=True needs workspace=…, the folder with pyproject.toml and uv.lock")
        return self

    @field_validator("secrets", mode="before")
    @classmethod
    def _names_alone(cls, value: object) -> object:
        if isinstance(value, str | Mapping):
            raise ValueError(
                "secrets: give a list of the names of variables, such as ['HF_TOKEN'], without their values"
            )
        return value

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not name or "=" in name or not name.isprintable():
                raise ValueError("secrets: give names of variables, such as 'HF_TOKEN', without their values")
        return tuple(dict.fromkeys(value))

    @field_validator("env_vars")
    @classmethod
    def _check(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, text in value.items():
            if not name or "=" in name or not is_carried(name + text):
                shown = masked({name: text})[name]
                raise ValueError(f"{name!r}={shown!r} cannot be an environment variable")
        return value


# Passed on from the submitter's environment when it has them: what training code usually wants to find.
_FORWARDED = ("HF_DATASETS_TRUST_REMOTE_CODE", "TOKENIZERS_PARALLELISM")


def create_environment(
    env_vars: Mapping[str, str] | None = None,
    *,
    workspace: str | Path | None = None,
    cwd: str | None = None,
    pip_packages: Sequence[str] = (),
    requirements: str | None = None,
    uv_lock: bool = False,
    python: str | None = None,
    image: str | None = None,
    mounts: Mapping[str, str] | None = None,
    secrets: Sequence[str] = (),
) -> EnvironmentConfig:
    """An environment with `env_vars`, and the defaults that training code usually expects.

    Tokens are not part of it: name them in `secrets`, such as ["HF_TOKEN", "WANDB_API_KEY"]. The rest is as in EnvironmentConfig.
    """
    forwarded = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    return EnvironmentConfig.model_validate(
        {
            "workspace": workspace,
            "cwd": cwd,
            "pip_packages": pip_packages,
            "requirements": requirements,
            "uv_lock": uv_lock,
            "python": python,
            "image": image,
            "mounts": mounts or {},
            "secrets": secrets,
            "env_vars": {"TOKENIZERS_PARALLELISM": "false", **forwarded, **(env_vars or {})},
        }
    )
