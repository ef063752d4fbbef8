"""What every command needs to know: which cluster, which namespace, which form of output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from fluster.cli.common.exit_codes import MAX_QUOTED, CommandError, ExitCode, say

if TYPE_CHECKING:
    from fluster.cluster import Cluster

PATIENCE_S = 600.0
MAX_SECONDS = 1e9  # 31 years: what is longer cannot be counted back from now


class Output(StrEnum):
    """Forms of output."""

    TABLE = "table"
    JSON = "json"


def check_pattern(text: str | None) -> str | None:
    """`text` if it is a regular expression; typer says so otherwise."""
    try:
        re.compile(text or "")
    except re.error as error:
        raise typer.BadParameter(f"invalid regular expression {text!r}: {error}") from error
    return text


# Of commands that print what tasks wrote.
Since = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, max=MAX_SECONDS, help="Only what was written in the last so many seconds."),
]
Grep = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", callback=check_pattern, help="Only lines in which this is found."),
]


def wrong_option(option: str, given: object, message: str) -> CommandError:
    """The error of an option whose value cannot be used: it names the option and quotes the value, once."""
    quoted = repr(given)
    named = option if quoted in message or len(quoted) > MAX_QUOTED else f"{option}={quoted}"
    return CommandError(f"{named}: {message}", ExitCode.USAGE)


def refuse_empty(option: str, given: str | Sequence[str] | None) -> None:
    """Raise CommandError for an option that was given without a value, as by a variable of the shell that is not
    set.
    """
    values = [given] if isinstance(given, str) else given or ()
    if not all(value.strip() for value in values):
        raise wrong_option(option, "", "it has no value: give one, or leave the option out")


def resources_option(given: str | Sequence[str], option: str = "--resource") -> dict[str, float]:
    """{name: count} of `--resource`, in one text or given several times. Raises CommandError."""
    from fluster_bus.messages.parts.counted import parse_counts

    try:
        return parse_counts(given if isinstance(given, str) else ",".join(given))
    except ValueError as error:
        raise wrong_option(option, given if isinstance(given, str) else ",".join(given), str(error)) from error


@dataclass(frozen=True)
class Options:
    """The options that stand before the command, or behind it."""

    address: str | None = None
    namespace: str | None = None
    output: Output = Output.TABLE
    patience: float = PATIENCE_S

    @classmethod
    def of(cls, context: typer.Context) -> Options:
        options = context.obj
        return options if isinstance(options, Options) else cls()

    @property
    def json(self) -> bool:
        return self.output is Output.JSON

    def connect(self) -> Cluster:
        """The cluster that is meant. Raises what `Cluster` raises."""
        from fluster.cluster import Cluster

        cluster = Cluster(self.address, self.namespace, patience=self.patience)
        cluster.asynchronous.outages.tell = say
        return cluster
