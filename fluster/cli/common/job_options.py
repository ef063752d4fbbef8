"""Options that describe a job, made into its request: what it runs, what it needs, and its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluster.cli.common.exit_codes import CommandError, ExitCode
from fluster.cli.common.options import resources_option, wrong_option

if TYPE_CHECKING:
    from pydantic import ValidationError

    from fluster_bus.messages import JobRequest, ResourceConfig
    from fluster_bus.messages.parts.arrays import TaskArray

_MAX_NAME = 40
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def make_request(
    command: list[str],
    *,
    name: str | None = None,
    resources: ResourceConfig | None = None,
    environment: dict[str, Any] | None = None,
    **fields: Any,
) -> JobRequest:
    """The job that the options describe. Raises CommandError for a value that is invalid."""
    from pydantic import ValidationError

    from fluster_bus.messages import Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig

    try:
        return JobRequest(
            name=name or name_of(command),
            entrypoint=Entrypoint(command=tuple(command)),
            resources=resources or ResourceConfig(),
            environment=EnvironmentConfig(**(environment or {})),
            **fields,
        )
    except ValidationError as error:
        raise _wrong(error) from error


# Where an option has another name than what it sets.
_OPTIONS = {
    "pip_packages": "pip",
    "max_retries_failure": "retries",
    "env_vars": "env",
    "secrets": "secret",
    "count": "gpu",
    "variant": "gpu",
}


def _wrong(error: ValidationError, **given: object) -> CommandError:
    """The first of what is wrong; `given` is {field: what was typed}, where that is not the field's own value."""
    from fluster_bus.messages import JobRequest
    from fluster_bus.messages.parts.model import in_our_words

    problem = error.errors()[0]
    text = in_our_words(problem["msg"])
    field = str(problem["loc"][0]) if problem["loc"] else ""
    if not field:  # it is about the whole: what begins with the name of a field speaks of that
        names_option = text.partition(" ")[0] in JobRequest.model_fields
        text = text.replace(" gang=True", " --gang").replace(" replicas=", " --replicas ")
        return CommandError(f"--{text}" if names_option else text, ExitCode.USAGE)
    option = _OPTIONS.get(field, field.removesuffix("_s")).replace("_", "-")
    if isinstance(problem["input"], tuple):  # of an option that may be given several times
        return wrong_option(f"--{option}", given.get(option, ",".join(problem["input"])), text)
    return wrong_option(f"--{option}", given.get(option, problem["input"]), text.removeprefix(f"{field}: "))


def array_option(text: str | None) -> TaskArray | None:
    """The array that `--array` describes. Raises CommandError."""
    from pydantic import ValidationError

    from fluster_bus.messages.parts.arrays import TaskArray

    try:
        return None if text is None else TaskArray.model_validate(text)
    except ValidationError as error:
        raise wrong_option("--array", text, _wrong(error).args[0]) from error


def name_of(command: list[str]) -> str:
    """A name for the job: that of its program, with what names cannot have left out."""
    program = re.sub(r"[^A-Za-z0-9_-]+", "-", command[0].rpartition("/")[2]).strip("-")
    return program[:_MAX_NAME] or "job"


def make_resources(
    cpu: float,
    memory: str,
    gpu: str | None,
    labels: Sequence[str] = (),
    *,
    disk: str | None = None,
    resources: Sequence[str] = (),
) -> ResourceConfig:
    """What one task needs. Raises CommandError for a value that is invalid."""
    from pydantic import ValidationError

    from fluster_bus.messages import ResourceConfig
    from fluster_bus.messages.parts.resources import parse_labels

    try:
        wanted = parse_labels(",".join(labels))
    except ValueError as error:
        raise wrong_option("--label", ",".join(labels), str(error)) from error
    asked = {"labels": wanted, "resources": resources_option(resources)}
    sizes: Any = {"memory": _size("--memory", memory), "disk": _size("--disk", disk) if disk is not None else 0}
    try:
        if gpu is None:
            return ResourceConfig.with_cpu(cpu, **sizes).model_copy(update=asked)
        return ResourceConfig.with_gpu(*_gpus(gpu), cpu=cpu, **sizes).model_copy(update=asked)
    except ValidationError as error:
        raise _wrong(error, memory=memory, disk=disk, gpu=gpu) from error


def _gpus(gpu: str) -> tuple[str, int]:
    """The model, which may be any, and how many."""
    match = re.fullmatch(r"(?:(?P<count>\d+)|(?P<model>[A-Za-z0-9][A-Za-z0-9_-]*?)(?::(?P<of_model>\d+))?)", gpu)
    if match is None:
        raise wrong_option("--gpu", gpu, "expected a model, a count or both, such as h100:8")
    return match["model"] or "any", int(match["count"] or match["of_model"] or 1)


def only_on(worker: str | None) -> list[str]:
    """The label by which a job runs on that worker only. Raises CommandError."""
    from fluster_bus.messages.parts.resources import WORKER_LABEL, parse_labels

    if worker is None:
        return []
    try:
        parse_labels(label := f"{WORKER_LABEL}={worker}")
    except ValueError as error:
        raise wrong_option("--on", worker, "expected a worker's name, as `fluster workers` shows it") from error
    return [label]


def check_secrets(request: JobRequest) -> None:
    """Raise CommandError when a variable that `--secret` names is not set, or all together are too large."""
    from fluster.cluster.jobs.submissions import secrets_of

    try:
        secrets_of(request)
    except ValueError as error:
        raise CommandError(f"--secret: {str(error).removeprefix('secrets: ')}", ExitCode.USAGE) from error


def _size(option: str, text: str) -> int:
    from fluster_bus.messages import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise wrong_option(option, text, str(error)) from error


def variables_option(files: Sequence[Path], assignments: Sequence[str]) -> dict[str, str]:
    """The variables of `--env-file`, file after file, then those of `--env`. Raises CommandError."""
    variables: dict[str, str] = {}
    for file in files:
        variables |= read_env_file(text_option("--env-file", file) or "", str(file))
    return variables | dict(split_assignment("--env", each) for each in assignments)


def text_option(option: str, file: Path | None) -> str | None:
    """The text of the file that an option names. Raises CommandError."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"{option} {file}: {reason}", ExitCode.USAGE) from error


def folder_option(path: Path | None) -> str | None:
    """The whole path of `--workspace`. Raises CommandError when it is not a folder."""
    if path is not None and not path.is_dir():
        raise CommandError(f"--workspace {path}: no such folder", ExitCode.USAGE)
    return str(path.absolute()) if path is not None else None


def python_option(python: str | None) -> str | None:
    """`--python`: a path is meant from this folder; a version stays."""
    if python is None or not ("/" in python or Path(python).is_dir()):
        return python
    return str(Path(python).expanduser().absolute())


def split_assignment(option: str, text: str) -> tuple[str, str]:
    """The name and the value in NAME=VALUE. Raises CommandError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"{option}={text!r}: write NAME=VALUE", ExitCode.USAGE)
    return name, value


def read_env_file(text: str, file: str) -> dict[str, str]:
    """The variables in a file as `docker run --env-file` and shells read it.

    A line is NAME=VALUE, which may begin with `export` and have its value in quotes, or a NAME alone, whose value is
    the present one if it is set; empty lines and those that begin with # are left out. Raises CommandError, which names
    file and line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        assignment = line.strip().removeprefix("export ").strip()
        if not assignment or assignment.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not _NAME.fullmatch(name):
            raise CommandError(f"--env-file {file}, line {number}: write NAME=VALUE", ExitCode.USAGE)
        if equals:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name] = value[1:-1] if is_quoted else value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables
