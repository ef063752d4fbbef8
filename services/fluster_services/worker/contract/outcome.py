"""How an attempt ended, read from what its runtime recorded."""

from __future__ import annotations

import base64
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fluster_bus.messages import JobStatus, Progress, TaskError, TaskResult
from fluster_services.capacity import describe_bytes
from fluster_services.worker.contract.attempt_records import ExitRecord

_NAMED_PIDS = 5
MAX_LINES = 20
MAX_BYTES = 4096
_MAX_LINE_CHARACTERS = 500
_CUT = "…"
# ECMA-48: control sequences (colours, cursor), strings up to their terminator (titles, links), and two-byte escapes.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|[\]PX^_].*?(?:\x07|\x1b\\|$)|[ -/]*[0-~]?)|\x9b[0-?]*[ -/]*[@-~]?")


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended, in the words of its record."""

    state: JobStatus
    reason: str
    exit_code: int | None = None
    error: TaskError | None = None
    last_words: str = ""  # the end of its output, when it failed
    result: TaskResult | None = None
    progress: Progress | None = None  # its last word
    is_own_end: bool = False  # it failed by itself, and was not stopped
    has_output: bool = False  # it was not started, and what was said while it was prepared is in its log
    is_unstarted: bool = False  # none of its code was reached, as its own process says
    is_workers_fault: bool = False  # it could not be started, and has nothing to do with that
    is_gpu_taken: bool = False  # it could not be started, since another holds a GPU that it was given
    is_spared: bool = False  # it was the worker's fault, and is charged to neither budget
    survivors: tuple[int, ...] = ()  # its processes that could not be killed
    filled_disk: bool = False  # it took all the room that its worker's disk had


def outcome(record: ExitRecord) -> Outcome:
    """What the end of a process means for its task; what of it could not be killed is named in the reason."""
    ended = _outcome(record)
    if not record.surviving_pids:
        return ended
    survivors = tuple(record.surviving_pids)
    reason = f"{ended.reason}; not all of it has ended: {describe_survivors(survivors)}"
    return replace(ended, reason=reason, survivors=survivors)


def gpu_taken(why: str) -> str:
    """The reason of an attempt that is given back since its GPU cannot be had."""
    return f"given back, as its GPU cannot be had: {why}"


def describe_survivors(pids: Sequence[int]) -> str:
    """What is wrong with processes that could not be killed."""
    named = ", ".join(map(str, pids[:_NAMED_PIDS])) + (" …" if len(pids) > _NAMED_PIDS else "")
    return f"process {named} survives SIGKILL, so it hangs in the kernel and keeps what it has"


_SUPERSEDED = "fluster.errors.SupersededError"


def _outcome(record: ExitRecord) -> Outcome:
    error = None
    if record.error is not None:
        error = TaskError(
            type=record.error.type,
            message=record.error.message,
            traceback=record.error.traceback,
            pickled=base64.b64decode(record.error.pickled) if record.error.pickled is not None else None,
            is_final=record.error.is_final,
        )
    if record.reason == "killed":
        return Outcome(JobStatus.KILLED, record.kill_reason or "killed", record.exit_code, error)
    if record.reason == "preempted":
        return Outcome(JobStatus.WORKER_FAILED, record.kill_reason or "preempted", record.exit_code)
    if record.reason in {"timed_out", "over_disk"}:
        return _failed(f"stopped: {record.kill_reason}", record, error)
    if record.reason == "fenced":
        return Outcome(JobStatus.WORKER_FAILED, "stopped by the fence: its worker was cut off from the bus")
    if record.reason == "worker_fault":
        reason = f"could not be started: {record.kill_reason}"
        return Outcome(JobStatus.WORKER_FAILED, reason, is_unstarted=True, is_workers_fault=True)
    if record.reason == "gpu_taken":
        return Outcome(
            JobStatus.WORKER_FAILED,
            gpu_taken(record.kill_reason or ""),
            is_unstarted=True,
            is_gpu_taken=True,
            is_spared=True,
        )
    if record.reason in {"keeper_died", "owner_gone"}:
        return Outcome(JobStatus.WORKER_FAILED, "its keeper was killed")
    if record.exit_code == 0 and not record.left_early:
        return Outcome(JobStatus.SUCCEEDED, "exit code 0", 0, result=_result(record))
    reason = _failure(record)
    if record.error is not None and record.error.type == _SUPERSEDED:
        # An actor whose place another has, or the backup from which the store was restored: its code has not failed.
        return Outcome(JobStatus.WORKER_FAILED, reason, record.exit_code, error)
    if record.disk_limit is not None:
        reason += f"; its disk of {describe_bytes(record.disk_limit)} was full"
    return replace(_failed(reason, record, error), is_own_end=True)


def _failed(reason: str, record: ExitRecord, error: TaskError | None) -> Outcome:
    is_unstarted = record.error is not None and record.error.is_unstarted
    last = last_words(record.log_tail)
    return Outcome(JobStatus.FAILED, reason, record.exit_code, error, last, is_unstarted=is_unstarted)


def _result(record: ExitRecord) -> TaskResult | None:
    if record.result_error is not None:
        return TaskResult(error=record.result_error)
    if record.result_bytes is None:
        return None
    return TaskResult(size=record.result_bytes, json_size=record.result_json_bytes)


def _failure(record: ExitRecord) -> str:
    if record.error is not None:
        return f"{record.error.type}: {record.error.message}"
    over = f"killed: over its memory limit of {describe_bytes(record.memory_limit)}" if record.memory_limit else ""
    if over and record.signal == signal.SIGKILL:
        return over
    if record.left_early:
        return "left with exit code 0 before its callable returned"
    if over:  # it was a process of the task's, not its main one
        return f"{_how(record)}, after a process of it was {over}"
    return _how(record)


def _how(record: ExitRecord) -> str:
    if record.signal is not None:
        how = f"killed by {_signal_name(record.signal)}"
        if record.oom:
            how += " while the machine was out of memory"
        return how
    return f"exit code {record.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_words(lines: Sequence[str]) -> str:
    """The last of `lines`, 20 at most and 4 KiB together, without what could steer a terminal."""
    kept: list[str] = []
    size = 0
    for line in reversed(lines[-MAX_LINES:]):
        text = _plain(line)
        size += len(text.encode()) + 1
        if size > MAX_BYTES:
            break
        kept.append(text)
    return "\n".join(reversed(kept)).strip("\n")


def _plain(line: str) -> str:
    shown = _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2]  # what a terminal would show of a progress bar
    text = "".join(each if each.isprintable() else " " for each in shown).rstrip()
    return text if len(text) <= _MAX_LINE_CHARACTERS else text[:_MAX_LINE_CHARACTERS] + _CUT
