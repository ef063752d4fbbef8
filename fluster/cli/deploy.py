"""`fluster deploy`: has the cluster run a class as actors, which live on."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fluster.cli.actors import json_argument, keyword_argument
from fluster.cli.common.exit_codes import CommandError, ExitCode
from fluster.cli.common.job_options import folder_option, make_resources, split_assignment
from fluster.cli.common.options import MAX_SECONDS, Options
from fluster.cli.common.output import write, write_json

if TYPE_CHECKING:
    from fluster.actors import ActorPool
    from fluster_bus.messages import ResourceConfig


def deploy(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="The class, in a module found from this folder.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="JSON", help="Arguments of its constructor, each as JSON.")
    ] = None,
    *,
    keywords: Annotated[
        list[str] | None,
        typer.Option("--kw", metavar="KEY=JSON", help="An argument by name; repeatable. Example: --kw start=5"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: the class's name. Example: --name counter")
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="COUNT", min=1, help="How many actors. Example: --replicas 4")] = 1,
    if_exists: Annotated[
        Literal["error", "get", "replace"],
        typer.Option(help="If the name is served: fail; leave it as it is; end that and take its place."),
    ] = "error",
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_SECONDS, help="Seconds to wait for the actors. Example: --timeout 600")
    ] = 300,
    cpu: Annotated[
        float | None,
        typer.Option(metavar="CPUS", help="CPUs of each actor. Default: as the class says. Example: --cpu 2"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of each. Default: as the class says. Example: --memory 8GB"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", "--gpus", metavar="MODEL:COUNT", help="GPUs of each actor. Example: --gpu h100:1"),
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=COUNT",
            help="Of something else that workers offer, for each; repeatable. Example: --resource license=1",
        ),
    ] = None,
    workspace: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Run in a copy of this folder. Example: --workspace .")
    ] = None,
    pip: Annotated[
        list[str] | None,
        typer.Option(metavar="PACKAGE", help="A package that it needs; repeatable. Example: --pip numpy"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="For its environment; repeatable. Example: --env MODE=full"),
    ] = None,
) -> None:
    """Have the cluster run a class as actors, and print the id of their job.

    They live on when this command has ended: `fluster cancel` with that id ends them.
    The module travels with them. What it imports from this folder does with --workspace.

    Try:
      fluster deploy counters:Counter 100 --name counter --replicas 2
      fluster deploy counters:Counter --name counter --if-exists replace
    """
    from fluster.actors import deploy as deploy_actors
    from fluster.actors.definition.definition import options_of
    from fluster_bus.messages import EnvironmentConfig

    actor_class = _load(target, travels=workspace is None)
    environment = options_of(actor_class).environment
    if workspace is not None or pip or env:
        values: dict[str, Any] = {"workspace": folder_option(workspace), "pip_packages": tuple(pip or ())}
        variables = dict(split_assignment("--env", each) for each in env or [])
        environment = EnvironmentConfig.model_validate({**values, "env_vars": variables})
    with Options.of(context).connect() as cluster, _of_the_class(target):
        pool: ActorPool[Any] = deploy_actors(
            cluster,
            actor_class,
            *(json_argument(text) for text in arguments or []),
            name=name,
            replicas=replicas,
            resources=_resources(actor_class, cpu, memory, gpu, resource or []),
            environment=environment,
            if_exists=if_exists,
            lifetime="detached",
            timeout=timeout,
            **dict(keyword_argument(text) for text in keywords or []),
        )
        job_id = pool.job_id or pool.members()[0].job_id
    if Options.of(context).json:
        write_json({"name": pool.name, "job_id": job_id})
    else:
        write(str(job_id))


def _resources(
    actor_class: type, cpu: float | None, memory: str | None, gpu: str | None, resources: Sequence[str]
) -> ResourceConfig | None:
    """What the class asks for, with what is given instead; None when nothing is."""
    from fluster.actors.definition.definition import resources_of

    if cpu is None and memory is None and gpu is None and not resources:
        return None
    own = resources_of(actor_class)
    given = make_resources(
        own.cpu if cpu is None else cpu, str(own.memory) if memory is None else memory, gpu, resources=resources
    )
    changed = {"cpu", "memory", *(["device"] if gpu is not None else []), *(["resources"] if resources else [])}
    return own.model_copy(update={name: getattr(given, name) for name in changed})


@contextmanager
def _of_the_class(target: str) -> Iterator[None]:
    """Turn what the class, or its constructor, raises into a CommandError: it is not a fault of fluster."""
    from pydantic import ValidationError

    from fluster.errors import FlusterError

    try:
        yield
    except (FlusterError, CommandError, ValidationError):
        raise
    except Exception as error:  # of the class: its constructor may raise anything
        raise CommandError(f"{target}: {type(error).__name__}: {error}", ExitCode.FAILED) from error


def _described(error: Exception) -> str:
    """The error, and the line at which the import ended."""
    frames = traceback.extract_tb(error.__traceback__)
    place = (
        "" if isinstance(error, SyntaxError) or not frames else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    )
    return f"{type(error).__name__}: {error}{place}"


def _load(target: str, *, travels: bool) -> type:
    """The class. Raises CommandError when there is none."""
    module_name, colon, name = target.partition(":")
    if not module_name or not colon or not name:
        raise CommandError(f"{target}: write MODULE:CLASS, such as counters:Counter", ExitCode.USAGE)
    folder = Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name.partition(".")[0] and error.name != module_name:
            text = f"{target}: {module_name} cannot be imported: {_described(error)}"
            raise CommandError(text, ExitCode.FAILED) from error
        raise CommandError(f"{target}: no module {module_name!r} is found from {folder}", ExitCode.USAGE) from error
    except Exception as error:  # of the module: what it does at its import may raise anything
        raise CommandError(
            f"{target}: {module_name} cannot be imported: {_described(error)}", ExitCode.FAILED
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise CommandError(f"{target}: {module_name} has no class {name!r}", ExitCode.USAGE)
    if travels and Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)  # a worker does not find what lies here
    return found
