"""What the end of a process means for its task."""

import base64
import pickle
from typing import Any

import pytest

from fluster.errors import SupersededError
from fluster_bus.messages import JobStatus
from fluster_services.worker.contract.attempt_records import ExitRecord, TaskError
from fluster_services.worker.contract.outcome import outcome


def _exit(**fields: Any) -> ExitRecord:
    return ExitRecord(**{"exit_code": 0, "signal": None, "reason": "exited", **fields})


@pytest.mark.parametrize(
    ("record", "state", "reason", "exit_code"),
    [
        (_exit(), JobStatus.SUCCEEDED, "exit code 0", 0),
        (_exit(left_early=True), JobStatus.FAILED, "left with exit code 0 before its callable returned", 0),
        (_exit(exit_code=3), JobStatus.FAILED, "exit code 3", 3),
        (_exit(exit_code=3, log_tail=["a", "b"]), JobStatus.FAILED, "exit code 3", 3),
        (_exit(exit_code=0, reason="preempted", kill_reason="shut down"), JobStatus.WORKER_FAILED, "shut down", 0),
        (_exit(exit_code=None, signal=9), JobStatus.FAILED, "killed by SIGKILL", None),
        (
            _exit(exit_code=None, signal=9, oom=True),
            JobStatus.FAILED,
            "killed by SIGKILL while the machine was out of memory",
            None,
        ),
        (_exit(exit_code=None, signal=99), JobStatus.FAILED, "killed by signal 99", None),
        (_exit(exit_code=None), JobStatus.FAILED, "exit code None", None),
        (_exit(exit_code=143, reason="killed", kill_reason="enough"), JobStatus.KILLED, "enough", 143),
        (_exit(exit_code=0, reason="killed"), JobStatus.KILLED, "killed", 0),
    ],
)
def test_ends(record: ExitRecord, state: JobStatus, reason: str, exit_code: int | None) -> None:
    ended = outcome(record)
    assert (ended.state, ended.reason, ended.exit_code) == (state, reason, exit_code)


def test_what_could_not_be_killed_is_named() -> None:
    killed = outcome(_exit(exit_code=None, signal=9, reason="killed", kill_reason="enough", surviving_pids=[12, 13]))
    assert killed.reason == (
        "enough; not all of it has ended: process 12, 13 survives SIGKILL, so it hangs in the kernel and keeps what it has"
    )
    assert (killed.state, killed.survivors) == (JobStatus.KILLED, (12, 13))
    assert "12, 13, 14, 15, 16 … survives" in outcome(_exit(surviving_pids=range(12, 20))).reason


@pytest.mark.parametrize("reason", ["fenced", "keeper_died", "owner_gone"])
def test_what_was_not_the_tasks_own_fault(reason: Any) -> None:
    assert outcome(_exit(exit_code=1, reason=reason)).state is JobStatus.WORKER_FAILED


def test_an_actor_that_was_superseded_has_not_failed() -> None:
    error = TaskError(type=f"{SupersededError.__module__}.{SupersededError.__qualname__}", message="by another")
    assert outcome(_exit(exit_code=1, error=error)).state is JobStatus.WORKER_FAILED


def test_the_exception_comes_along() -> None:
    pickled = base64.b64encode(pickle.dumps(ValueError("bad"))).decode()
    error = TaskError(type="ValueError", message="bad", traceback="Traceback …", pickled=pickled)
    ended = outcome(_exit(exit_code=1, error=error, log_tail=["noise"]))
    assert ended.reason == "ValueError: bad"
    assert ended.error is not None
    assert ended.error.pickled is not None
    assert pickle.loads(ended.error.pickled).args == ("bad",)
    unpicklable = outcome(_exit(exit_code=1, error=TaskError(type="E", message="m")))
    assert unpicklable.error is not None
    assert unpicklable.error.pickled is None


@pytest.mark.parametrize("fields", [{}, {"reason": "timed_out"}, {"error": TaskError(type="E", message="m")}])
def test_what_failed_has_last_words(fields: dict[str, Any]) -> None:
    assert outcome(_exit(exit_code=1, log_tail=["a", "b"], **fields)).last_words == "a\nb"


@pytest.mark.parametrize("fields", [{}, {"reason": "killed", "exit_code": 1}, {"reason": "fenced", "exit_code": 1}])
def test_what_did_not_fail_has_none(fields: dict[str, Any]) -> None:
    assert outcome(_exit(log_tail=["a", "b"], **fields)).last_words == ""
