"""What every command needs to know: which cluster, which namespace, which form of output; and jobs and workers by the beginning of an id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fluster.cli.common.exit_codes import MAX_QUOTED, CommandError, ExitCode, say

if TYPE_CHECKING:
    from fluster.cluster import Cluster
    from fluster_bus.messages import JobId, WorkerId

PATIENCE_S = 600.0
MAX_SECONDS = 1e9  # 31 years: what is longer cannot be counted back from now
T = TypeVar("T")

NEWEST = "last"  # stands for the job that was submitted last

_SHORTENED = 10_000  # jobs among which a shortened id is looked up
_LIKENED = 1_000  # the newest, among which one is looked for that is like an id that does not exist


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


def find_job(cluster: Cluster, text: str) -> JobId:
    """The job with that id, else the newest for `last`, else the only one whose id begins so, unfinished ones first.

    Raises JobNotFoundError, and CommandError when several ids begin so.
    """
    from fluster.errors import JobNotFoundError
    from fluster_bus.messages import JobId

    try:
        return cluster.poll(JobId(text)).job_id
    except JobNotFoundError as error:
        found = _newest(cluster) if text == NEWEST else _beginning(cluster, text)
        if found is None:
            if text == NEWEST:
                raise JobNotFoundError(f"namespace {cluster.namespace!r} has no job yet") from error
            known = [job.job_id for job in cluster.list_jobs(limit=_LIKENED)]
            raise JobNotFoundError(f"{error}{_meant(text, known)}") from error
    return found


def _newest(cluster: Cluster) -> JobId | None:
    return next((job.job_id for job in cluster.list_jobs(limit=1)), None)


def _beginning(cluster: Cluster, text: str) -> JobId | None:
    from fluster_bus.messages import JobId, JobStatus

    unfinished = [state for state in JobStatus if not state.finished()]
    for states in (unfinished, []):
        matching = [job.job_id for job in cluster.list_jobs(limit=_SHORTENED, states=states)]
        matching = [job_id for job_id in matching if job_id.startswith(text)]
        if matching:
            return JobId(_only("jobs", text, matching))
    return None


def at_worker(cluster: Cluster, text: str, call: Callable[[WorkerId], T], *, in_full: bool = False) -> T:
    """What `call` returns for the worker of that id, or, unless it is to be written in full, for the only one whose id
    begins so.

    Raises WorkerNotFoundError, and CommandError when several ids begin so.
    """
    from fluster.errors import WorkerNotFoundError
    from fluster_bus.messages import WorkerId

    try:
        return call(WorkerId(text))
    except WorkerNotFoundError as error:
        known = [worker.info.worker_id for worker in cluster.list_workers() if worker.info.worker_id != text]
        matching = [worker_id for worker_id in known if worker_id.startswith(text)]
        if in_full or not matching:
            raise WorkerNotFoundError(f"{error}{_meant(text, known)}") from error
    return call(WorkerId(_only("workers", text, matching)))


def unknown_worker(cluster: Cluster, name: str) -> str | None:
    """What is to be said when no worker of that name is known; None when one is."""
    from fluster_bus.core.names import no_worker_named

    known = [worker.info.worker_id for worker in cluster.list_workers()]
    return None if name in known else no_worker_named(name, known)


def _meant(text: str, known: Sequence[str]) -> str:
    """Which of `known`, the newest first, are like `text` or begin with something like it."""
    from fluster_bus.core.names import did_you_mean, near_names

    by_beginning = {each[: len(text)]: each for each in reversed(known)}
    return did_you_mean(by_beginning[beginning] for beginning in near_names(text, by_beginning))


def _only(kind: str, text: str, matching: Sequence[str]) -> str:
    if len(matching) > 1:
        shown = ", ".join(matching[:5]) + (" …" if len(matching) > 5 else "")
        raise CommandError(f"{len(matching)} {kind} begin with {text!r}: {shown}; write more of it", ExitCode.NOT_FOUND)
    return matching[0]
