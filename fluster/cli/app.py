"""The commands of `fluster`, and what they have in common."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from fluster.cli import (
    actors,
    backups,
    certificates,
    clusters,
    credentials,
    daemons,
    deploy,
    jobs,
    namespaces,
    submit,
    tokens,
    workers,
)
from fluster.cli.common.exit_codes import DEBUG_VARIABLE, EXIT_CODES_HELP, ExitCode, report, report_usage
from fluster.cli.common.help_texts import put_into_words
from fluster.cli.common.options import MAX_SECONDS, PATIENCE_S, Options, Output

# Words behind these belong to the job's command, or are JSON, also when they look like options.
_WORDS = {"allow_interspersed_args": False}
_JSON = {"ignore_unknown_options": True}
# Of all that is wrong with what was typed; typer exports one kind of it.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="fluster",
    epilog=EXIT_CODES_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"fluster {version('fluster')}\n")
        raise typer.Exit


@app.callback()
def shared(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The cluster: a URL with credentials, or a file of them. Default: $FLUSTER_CLUSTER_ADDRESS, else "
            "the `fluster up` "
            "of this machine and user.",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Default: $FLUSTER_NAMESPACE, else 'default'.")
    ] = None,
    output: Annotated[Output, typer.Option(help="Tables for people, or JSON for programs.")] = Output.TABLE,
    patience: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            max=MAX_SECONDS,
            help="How long what waits for a job goes on while the cluster cannot be reached.",
        ),
    ] = PATIENCE_S,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Actors and jobs on one message bus.

    Try:
      fluster demo                               see it work
      fluster up                                 run a cluster on this machine
      fluster submit --follow -- python job.py   use it from another terminal

    --address, --namespace, --output and --patience may stand before the command or behind it.
    """
    context.obj = Options(address, namespace, output, patience)


def _add(name: str, command: Callable[..., None], panel: str, **context_settings: object) -> None:
    app.command(name, rich_help_panel=panel, context_settings=context_settings)(_guarded(command))


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command, ending with one line and an exit code whatever goes wrong."""

    @functools.wraps(command)
    def run(*args: object, **kwargs: object) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:
            raise
        except BaseException as error:
            raise typer.Exit(report(error)) from error

    return run


_add("demo", clusters.demo, "Clusters")
_add("up", clusters.up, "Clusters")
_add("local", clusters.local, "Clusters")
_add("workers", workers.workers, "Workers")
_add("nodes", workers.nodes, "Workers")
_add("submit", submit.submit, "Jobs", **_WORDS)
_add("ps", jobs.ps, "Jobs")
_add("status", jobs.status, "Jobs")
_add("explain", jobs.explain, "Jobs")
_add("stack", jobs.stack, "Jobs")
_add("logs", jobs.logs, "Jobs")
_add("result", jobs.result, "Jobs")
_add("cancel", jobs.cancel, "Jobs")
_add("deploy", deploy.deploy, "Actors", **_JSON)
_add("actors", actors.actors, "Actors")
_add("actor", actors.actor, "Actors")
_add("call", actors.call, "Actors", **_JSON)

worker = typer.Typer(
    name="worker", help="Ask one worker, send it away, or run one. For operators.", no_args_is_help=True
)
_WORKER_VERBS: dict[str, Callable[..., None]] = {
    "health": workers.health,
    "list": workers.attempts,
    "status": workers.status,
    "logs": workers.logs,
    "kill": workers.kill,
    "drain": workers.drain,
}
for _name, _command in _WORKER_VERBS.items():
    worker.command(_name)(_guarded(_command))
worker.command("start")(_guarded(daemons.with_options(daemons.start_worker, daemons.WORKER_SETTINGS)))
app.add_typer(worker, rich_help_panel="Workers")

controller = typer.Typer(name="controller", help="Run a controller of a cluster.", no_args_is_help=True)
controller.callback()(lambda: None)  # a group of one command is a group too
controller.command("start")(_guarded(daemons.with_options(daemons.start_controller, daemons.CONTROLLER_SETTINGS)))
app.add_typer(controller, rich_help_panel="Clusters")

trust = typer.Typer(
    name="credentials",
    help="""Say who may use a cluster: make credentials for its users, and take them back.

    Try:
      fluster credentials init
      fluster credentials add client alice --namespace default
    """,
    no_args_is_help=True,
)
_CREDENTIALS_VERBS: dict[str, Callable[..., None]] = {
    "init": credentials.init,
    "add": credentials.add,
    "revoke": credentials.revoke,
    "ls": credentials.ls,
    "push": credentials.push,
    "passwords": credentials.passwords,
    "certificates": certificates.certificates,
}
for _name, _command in _CREDENTIALS_VERBS.items():
    trust.command(_name)(_guarded(_command))
app.add_typer(trust, rich_help_panel="Clusters")

join_tokens = typer.Typer(
    name="token",
    help="""Let machines become workers of a cluster, by tokens.

    Try:
      fluster token create --uses 10 --for 12h
    """,
    no_args_is_help=True,
)
_TOKEN_VERBS: dict[str, Callable[..., None]] = {
    "create": tokens.create,
    "ls": tokens.ls,
    "revoke": tokens.revoke,
    "keys": tokens.keys,
}
for _name, _command in _TOKEN_VERBS.items():
    join_tokens.command(_name)(_guarded(_command))
app.add_typer(join_tokens, rich_help_panel="Clusters")

namespace_group = typer.Typer(
    name="namespace",
    help="""Add, change, drop and list the namespaces of a running cluster. For operators.

    Try:
      fluster namespace add team-a --cpus 64
      fluster namespace ls
    """,
    no_args_is_help=True,
)
_NAMESPACE_VERBS: dict[str, Callable[..., None]] = {
    "add": namespaces.add,
    "set": namespaces.set_,
    "drop": namespaces.drop,
    "ls": namespaces.ls,
}
for _name, _command in _NAMESPACE_VERBS.items():
    namespace_group.command(_name)(_guarded(_command))
app.add_typer(namespace_group, rich_help_panel="Clusters")

backup = typer.Typer(
    name="backup",
    help="""Keep a copy of what a cluster keeps, and restore it. For operators.

    Try:
      fluster backup create backups/monday
    """,
    no_args_is_help=True,
)
_BACKUP_VERBS: dict[str, Callable[..., None]] = {
    "create": backups.create,
    "show": backups.show,
    "restore": backups.restore,
}
for _name, _command in _BACKUP_VERBS.items():
    backup.command(_name)(_guarded(_command))
app.add_typer(backup, rich_help_panel="Clusters")

# Those that bring their own cluster, or look for what there is on this machine, and which shared options they use.
_ALONE: dict[str, tuple[str, ...]] = {
    "demo": (),
    "up": (),
    "local": ("output",),
    "passwords": (),
    "init": (),
}


def _set_option(context: Any, parameter: Any, value: Any) -> None:
    if value is not None:
        context.obj = dataclasses.replace(Options.of(context), **{parameter.name: value})


def _with_shared_options(group: Any) -> Any:
    """The same commands, which take the shared options behind their name too."""
    put_into_words(group)
    inner = [each for command in group.commands.values() for each in getattr(command, "commands", {}).items()]
    shared_names = tuple(field.name for field in dataclasses.fields(Options))
    for option in group.params:
        for name, command in [*group.commands.items(), *inner]:
            has_its_own = option.name in {each.name for each in command.params}
            if option.name in _ALONE.get(name, shared_names) and not has_its_own:
                again = copy.copy(option)
                again.default, again.expose_value, again.callback = None, False, _set_option
                command.params.append(again)
    return group


def commands_for(words: Sequence[str]) -> typer.Typer:
    """All commands, or only the one that the words begin with: to build the others is a tenth of what a short one
    takes.
    """
    name = words[0] if words else None
    chosen = copy.copy(app)
    chosen.registered_commands = [each for each in app.registered_commands if each.name == name]
    chosen.registered_groups = [
        each
        for each in app.registered_groups
        if each.typer_instance is not None and each.typer_instance.info.name == name
    ]
    return chosen if chosen.registered_commands or chosen.registered_groups else app


def main() -> None:
    """Run the command that the shell was given."""
    if os.environ.get(DEBUG_VARIABLE):
        logging.basicConfig(level=logging.INFO)
    else:
        logging.getLogger().addHandler(logging.NullHandler())  # what goes wrong is reported once, in one line
    for stream in (sys.stdout, sys.stderr):
        # What tasks print may be anything: it must not break a terminal with a narrower encoding.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run(_with_shared_options(typer.main.get_command(commands_for(sys.argv[1:])))))


def _run(group: Any) -> int:
    try:
        return group(prog_name="fluster", standalone_mode=False) or ExitCode.OK
    except _UsageError as error:
        return report_usage(error)
