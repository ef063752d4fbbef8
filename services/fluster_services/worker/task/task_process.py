"""The task itself, between the keeper's fork and the user's code: a process as fresh as a forked one can be."""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fluster.breakpoints import with_hook
from fluster.progress_file import DIRECTORY_VARIABLE
from fluster.remote_errors.kindred_errors import add_remedy, from_user_code
from fluster.tracing import continue_trace
from fluster_bus.running.linux_calls import die_with_parent, set_process_name
from fluster_services.worker.contract.attempt_directory import ERROR_FILE, SPEC_FILE, WORK_FOLDER
from fluster_services.worker.contract.attempt_records import (
    INHERITED_VARIABLES,
    MAX_MESSAGE_CHARACTERS,
    LaunchSpec,
    TaskError,
    describe_error,
    folder_in_workspace,
    from_json,
    to_json,
)
from fluster_services.worker.contract.container import OWN_MINOR
from fluster_services.worker.linux import cgroups
from fluster_services.worker.linux.processes import (
    KEEPER_SIGNALS,
    close_fds_except,
    handled_signals,
    reset_signals,
    spawn,
)
from fluster_services.worker.task.interpreter_end import end_interpreter
from fluster_services.worker.task.progress_pipe import leave_word
from fluster_services.worker.task.task_result import finished, keep_result

EXIT_NOT_EXECUTABLE = 126  # as shells have it
EXIT_NOT_FOUND = 127

_RARE_COLLECTIONS = 100_000  # more objects than most imports make

# The objects that a task replaces live on: their end would close descriptors whose numbers are the task's by then.
_replaced: list[object] = []


def run_task(
    spec: LaunchSpec,
    directory: Path,
    *,
    keeper_pid: int,
    faults_fd: int,
    stdout_fd: int,
    stderr_fd: int,
    umask: int,
    kept_fds: Sequence[int] = (),
) -> NoReturn:
    """Become the task, in a child that its keeper has just forked; never returns. It keeps `kept_fds` open.

    What the machine lacks for that is written to `faults_fd`, which is closed before any of the task's own code runs.
    """
    exit_code = 1
    try:
        os.setsid()
        die_with_parent(signal.SIGKILL)
        if os.getppid() != keeper_pid:  # it died before the kernel knew
            os._exit(1)
        set_process_name("fluster-task")
        _take_limits(spec, faults_fd)
        take_descriptors(stdout_fd, stderr_fd, *kept_fds)
        command = _command(spec, directory)
        reset_signals(KEEPER_SIGNALS if command is None else handled_signals(), is_python=command is None)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.umask(umask)
        _enter_folder(spec, directory)
        os.write(2, notice_of(spec))
        environment = _environment(spec, directory)
        if command is not None:
            for fd in kept_fds:
                os.set_inheritable(fd, True)
            _execute(command, environment)
        exit_code = _run_callable(spec, directory, environment)
    except CannotStartError as error:
        complain(directory, error)
        exit_code = error.exit_code
    except BaseException:
        # Ours, not the user's: it must be seen, and must not climb into the keeper's own stack.
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(exit_code)


def spawn_task(spec: LaunchSpec, directory: Path, *, stdout_fd: int, stderr_fd: int, umask: int) -> int | None:
    """Return the pid of the task, started without a fork; None when it needs `run_task` in one.

    To be called by its keeper, in `directory`.
    """
    command = _command(spec, directory)
    if command is None or spec.workspace is not None or spec.groups or spec.notice:
        return None
    try:
        _enter_folder(spec, directory)
        environment = _environment(spec, directory)
        return spawn(command, environment, stdout_fd=stdout_fd, stderr_fd=stderr_fd, umask=umask)
    except (CannotStartError, OSError):
        return None  # `run_task` meets the same, and reports it
    finally:
        os.chdir(directory)


def _command(spec: LaunchSpec, directory: Path) -> list[str] | None:
    """What is to be executed; None when a callable is to be run in a copy of this process."""
    if spec.command is None and spec.python_given is not None and spec.python is not None:
        details = [OWN_MINOR, spec.python_given, *spec.python_behind]
        return [spec.python, "-c", _RUN_IN_EXISTING, str(directory), *details]
    if spec.command is None and spec.python is not None:
        return [spec.python, "-P", "-c", _RUN_EXECUTED, str(directory)]
    return spec.command


# The code that an interpreter of the task's own runs.
_RUN_EXECUTED = f"import sys; from {__name__} import run_executed; run_executed(sys.argv[1])"

# The code for one that is used as it is. It may be of any version, and was not asked before.
_RUN_IN_EXISTING = f"""
import sys
directory, wanted, given = sys.argv[1:4]
found = "%d.%d" % sys.version_info[:2]
if found != wanted:
    sys.exit(
        "fluster: python=%r is Python %s and this worker's is %s: a callable needs the worker's own minor version. "
        "Give the job as a command, or name a Python %s" % (given, found, wanted, wanted)
    )
import site
sys.path[:] = [entry for entry in sys.path if entry]
for entry in sys.argv[4:]:
    site.addsitedir(entry) if entry.endswith("-packages") else sys.path.append(entry)
from {__name__} import run_executed
run_executed(directory)
"""


def run_executed(directory: str) -> NoReturn:
    """Run the callable of the attempt in `directory`, in an interpreter that was started for it; never returns."""
    place, exit_code = Path(directory), 1
    environment = dict(os.environ)
    freshen_interpreter()
    try:
        spec = from_json(LaunchSpec, json.loads((place / SPEC_FILE).read_bytes()))
        exit_code = _run_callable(spec, place, environment)
    except CannotStartError as error:
        complain(place, error)
        exit_code = error.exit_code
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))  # ours, as in `run_task`
    finally:
        os._exit(exit_code)


class CannotStartError(Exception):
    """The task's code was never reached."""

    def __init__(self, kind: str, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.exit_code = exit_code


def complain(directory: Path, error: CannotStartError, *, pipe_folder: Path | None = None) -> None:
    """Tell the keeper why the task's code was never reached; its pipe is in `pipe_folder`, if not in `directory`."""
    os.write(2, f"fluster: {error}\n".encode(errors="replace"))
    told = TaskError(type=error.kind, message=str(error), is_unstarted=True)
    leave_word(directory / ERROR_FILE, to_json(told), pipe_folder=pipe_folder)


def notice_of(spec: LaunchSpec) -> bytes:
    """The line with which its stderr begins; nothing if there is nothing to say."""
    return f"fluster: {spec.notice}\n".encode(errors="replace") if spec.notice else b""


def _take_limits(spec: LaunchSpec, faults_fd: int) -> None:
    try:
        cgroups.make(spec.groups)
        cgroups.enter(spec.groups)
    except OSError as cause:
        os.write(faults_fd, f"its limits cannot be set: {cause.filename}: {cause.strerror}".encode())
        os._exit(EXIT_NOT_EXECUTABLE)


def take_descriptors(stdout_fd: int, stderr_fd: int, *kept: int) -> None:
    stdin_fd = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((stdin_fd, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    close_fds_except((0, 1, 2, *kept))


def _environment(spec: LaunchSpec, directory: Path) -> dict[str, str]:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in spec.unset},
        "PYTHONUNBUFFERED": "1",  # or a command's output would be seen when it ends
        DIRECTORY_VARIABLE: str(directory),
        **spec.env,
    }
    # Other programs, which may be other Pythons, find what is the job's own and nothing of this one's.
    found_first = _workspace_path(spec, directory)
    if found_first:
        after = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        environment["PYTHONPATH"] = os.pathsep.join([*found_first, *after])
    return with_hook(environment)


def _workspace_path(spec: LaunchSpec, directory: Path) -> list[str]:
    """Where modules are found first: in the task's own workspace, if it has one."""
    folders = (directory / WORK_FOLDER, directory / WORK_FOLDER / "src") if spec.workspace is not None else ()
    return [str(folder) for folder in folders if folder.is_dir()]


def _enter_folder(spec: LaunchSpec, directory: Path) -> None:
    is_own = spec.working_dir is None or spec.workspace is not None
    folder = directory / WORK_FOLDER if is_own else Path(spec.working_dir or "")
    try:
        if spec.workspace is not None:
            shutil.copytree(spec.workspace, folder, symlinks=True, dirs_exist_ok=spec.scratch is not None)
        elif is_own:
            folder.mkdir(exist_ok=True)
        os.chdir(folder / folder_in_workspace(spec))
    except shutil.Error as cause:
        message = f"the workspace could not be copied to {str(folder)!r}: {cause}"
        raise CannotStartError("OSError", message[:MAX_MESSAGE_CHARACTERS], EXIT_NOT_EXECUTABLE) from cause
    except OSError as cause:
        raise CannotStartError(
            type(cause).__name__,
            f"the working directory {cause.filename or str(folder)!r} cannot be entered: {cause.strerror}",
            EXIT_NOT_EXECUTABLE,
        ) from cause


def _execute(command: list[str], environment: dict[str, str]) -> NoReturn:
    try:
        os.execvpe(command[0], command, environment)
    except FileNotFoundError as cause:
        if "/" in command[0] and Path(command[0]).exists():
            message = f"command {command[0]!r} is there, but the interpreter that its first line names is not"
        elif "/" in command[0]:
            message = f"command {command[0]!r} was not found (from {str(Path.cwd())!r})"
        else:
            message = f"command {command[0]!r} was not found (PATH is {environment['PATH']!r})"
        raise CannotStartError(type(cause).__name__, message, EXIT_NOT_FOUND) from cause
    except (OSError, ValueError) as cause:
        reason = getattr(cause, "strerror", None) or str(cause)
        message = f"command {command[0]!r} cannot be executed: {reason}"
        raise CannotStartError(type(cause).__name__, message, EXIT_NOT_EXECUTABLE) from cause


def _read_payload(spec: LaunchSpec, directory: Path) -> bytes:
    path = directory / (spec.payload_file or "")
    try:
        return path.read_bytes()
    except OSError as cause:
        message = f"the payload {str(path)!r} cannot be read: {cause.strerror}"
        raise CannotStartError(type(cause).__name__, message, EXIT_NOT_EXECUTABLE) from cause


def _run_callable(spec: LaunchSpec, directory: Path, environment: dict[str, str]) -> int:
    payload = _read_payload(spec, directory)
    python_path = [*_workspace_path(spec, directory), *spec.python_path]
    sys.path[:] = [*python_path, *(entry for entry in sys.path if entry not in ("", *python_path))]
    _replace_environment(environment)
    random.seed()
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    try:
        exit_code = _call(payload, directory, keeps_none=spec.must_return)
        end_interpreter()
    except BaseException as error:
        exit_code = _exit_code_of(error, directory)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            exit_code = exit_code or 120  # as the interpreter has it
    if exit_code == -signal.SIGINT:  # so that who waits sees an interrupt, as with any Python program
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return exit_code


def _replace_environment(environment: dict[str, str]) -> None:
    """Change only what is different: most is not, and each change is a page or two."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _call(payload: bytes, directory: Path, *, keeps_none: bool) -> int:
    try:
        continue_trace()
        function, args, kwargs = _unpickled(payload)
        refs: Any = sys.modules.get("fluster.cluster.refs")  # there are none where nothing has imported it
        if refs is not None and refs.Ref.in_use:
            args, kwargs = refs.resolved(args, kwargs)
        returned = finished(function(*args, **kwargs))
        if returned is not None or keeps_none:
            keep_result(returned, directory)
    except BaseException as error:
        return _exit_code_of(error, directory)
    return 0


def _unpickled(payload: bytes) -> Any:
    # What modules are made of stays: to look through it again and again takes a fourth of an import.
    usual = gc.get_threshold()
    rare = (_RARE_COLLECTIONS, *usual[1:])
    gc.set_threshold(*rare)
    gc.enable()
    try:
        return pickle.loads(payload)
    except ModuleNotFoundError as error:
        add_remedy(error, "the job's callable", sent="the launch")
        raise
    finally:
        if gc.get_threshold() == rare:  # no module has chosen another
            gc.set_threshold(*usual)


def _exit_code_of(error: BaseException, directory: Path) -> int:
    """Report `error` as the interpreter would, and return the exit code that it would have."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1
    if error.__traceback__ is not None:
        error.__traceback__ = from_user_code(error.__traceback__.tb_next)  # the first frame is ours
    sys.excepthook(type(error), error, error.__traceback__)
    leave_word(directory / ERROR_FILE, to_json(describe_error(error)))
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def freshen_interpreter(environment: Mapping[str, str] | None = None) -> None:
    """Make this process one that tasks can be copies of: as if the interpreter had just started, but for what is imported.

    Its environment is the one given, by default those of its own variables that are safe to pass on.

    Done once, in the template: in each copy it would touch, and so copy, hundreds of pages.
    """
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    replaced_streams = (sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__)
    _replaced.extend((sys.modules["__main__"], *replaced_streams))
    sys.modules["__main__"] = main
    # On the numbers, whatever they lead to in each copy.
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _line_buffered(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _line_buffered(2)  # type: ignore[misc]
    sys.excepthook = sys.__excepthook__
    sys.breakpointhook = sys.__breakpointhook__
    sys.argv = ["fluster-task"]
    importlib.invalidate_caches()
    if environment is None:
        environment = {
            name: value for name, value in os.environ.items() if name in INHERITED_VARIABLES or name.startswith("LC_")
        }
    os.environ.clear()
    os.environ.update({"PATH": os.defpath, **environment})
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    _reset_warnings()


def _line_buffered(fd: int) -> Any:
    # A print of an odd character must not end a job of days.
    return os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _reset_warnings() -> None:
    warnings.resetwarnings()
    for category in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")
