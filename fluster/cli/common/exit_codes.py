"""How a command of `fluster` can end, and what it says on stderr then."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from enum import IntEnum
from typing import Any

DEBUG_VARIABLE = "FLUSTER_DEBUG"
MAX_QUOTED = 200  # characters of a wrong value
_NO_NAMESPACE = "NamespaceNotFound"  # the controller's word


_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class ExitCode(IntEnum):
    """What the command returns to the shell. Stable: scripts rely on it."""

    OK = 0
    FAILED = 1  # a job, an actor's method or the demo's check failed, or the output could not be written
    USAGE = 2
    NO_CLUSTER = 3  # no address, no answer, credentials refused, lost for too long, or it did not start
    NOT_FOUND = 4  # no such job, actor, worker or namespace
    BUG = 70  # of sysexits.h: an error that was not foreseen
    INTERRUPTED = 130  # 128 + SIGINT
    BROKEN_PIPE = 141  # 128 + SIGPIPE


EXIT_CODES_HELP = (
    "Exit codes: 0 it went well; 1 the job or the actor's method failed, or the output could not be written; "
    "2 wrong usage; 3 no cluster (no address, no answer, credentials refused, lost for too long, it did not start); "
    "4 no such job, actor, worker or namespace; 70 an error in fluster itself; 130 interrupted; "
    f"141 the reader of the output closed the pipe. {DEBUG_VARIABLE}=1 shows the traceback of an error."
)


class CommandError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def say(text: str) -> None:
    """One line for the person at the terminal; results go to stdout instead."""
    sys.stderr.write(f"fluster: {one_line(text)}\n")
    sys.stderr.flush()


def one_line(text: str) -> str:
    """`text` without line ends and without what could steer a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def report(error: BaseException) -> ExitCode:
    """Tell what went wrong, in one line with the remedy, and return how to end."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _forget_stdout()
        return ExitCode.BROKEN_PIPE
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    code, message = _code_and_message(error)
    say(message)
    return code


def report_usage(error: Any) -> ExitCode:
    """Tell what is wrong with what was typed, in one line; `error` is one of typer's."""
    if text := _of_typer(error):  # else it was nothing, and typer has shown the help
        command = error.ctx.command_path if error.ctx is not None else "fluster"
        say(f"{text[0].lower()}{text[1:].removesuffix('.')} (`{command} --help`)")
    return ExitCode.USAGE


def _of_typer(error: Any) -> str:
    from pydantic import ValidationError

    from fluster_bus.messages.parts.model import in_our_words

    near = [each for each in getattr(error, "possibilities", None) or () if each.startswith("--")]
    if near:
        from fluster_bus.core.names import did_you_mean, near_names

        return f"no such option: {error.option_name}{did_you_mean(near_names(error.option_name, near)[:1] or near)}"
    parameter = getattr(error, "param", None)
    if parameter is None or getattr(error, "param_type", None) is not None or not error.message:
        return str(error.format_message())
    option = next((each for each in parameter.opts if each.startswith("--")), parameter.name)
    message = in_our_words(error.message)
    if isinstance(error.__cause__, ValidationError):
        given = error.__cause__.errors()[0]["input"]
        if repr(given) not in message and len(repr(given)) <= MAX_QUOTED:
            return f"{option}={given!r}: {message}"
    return f"{option}: {message}"


def _code_and_message(error: BaseException) -> tuple[ExitCode, str]:
    # Imported here: a command that works, and `fluster --help`, need none of them.
    from pydantic import ValidationError

    from fluster import errors
    from fluster_bus.core import errors as bus

    if isinstance(error, CommandError):
        return error.exit_code, str(error)
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_context=False)
        return ExitCode.USAGE, "; ".join(_told(each["loc"], each["input"], each["msg"]) for each in problems)
    if isinstance(error, errors.JobNotFoundError | errors.ActorNotFoundError | errors.WorkerNotFoundError):
        return ExitCode.NOT_FOUND, str(error)
    if isinstance(error, bus.ServiceError) and error.code == _NO_NAMESPACE:
        return ExitCode.NOT_FOUND, str(error)
    if isinstance(error, bus.NoRespondersError | bus.RequestTimeoutError):
        return ExitCode.NO_CLUSTER, f"{error}: is the cluster's controller up?"
    no_cluster = (
        bus.AddressError,
        bus.BusyError,
        bus.ConnectError,
        bus.ClosedError,
        bus.DisconnectedError,
        bus.ServerStartError,
        errors.ClusterStartError,
        errors.NoClusterError,
        errors.ConnectionLostError,
    )
    if isinstance(error, no_cluster):
        return ExitCode.NO_CLUSTER, str(error)
    if isinstance(error, bus.InvalidNameError):
        return ExitCode.USAGE, str(error)
    if isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
        _forget_stdout()
        return ExitCode.FAILED, f"the output could not be written: {error.strerror}"
    if isinstance(error, errors.FlusterError):
        return ExitCode.FAILED, str(error)
    return (
        ExitCode.BUG,
        f"an error that was not foreseen: {type(error).__name__}: {error} ({DEBUG_VARIABLE}=1 shows where)",
    )


def _told(place: tuple[int | str, ...], given: object, message: str) -> str:
    """One problem of a message: where it is, what is there if that is short, and what is wrong with it."""
    from fluster_bus.messages.parts.model import in_our_words

    where = ".".join(str(part) for part in place)
    message = in_our_words(message)
    if not where:
        return message
    # Of a larger part most is right, and it may hold what others are not to read, such as environment variables.
    is_short = isinstance(given, str | int | float) and len(repr(given)) <= MAX_QUOTED
    return f"{where}={given!r}: {message}" if is_short else f"{where}: {message}"


def _forget_stdout() -> None:
    """It takes no more, or its reader has left: what is still buffered would fail once more when the interpreter
    ends.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
