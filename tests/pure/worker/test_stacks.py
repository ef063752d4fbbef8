"""What is made of what py-spy says: it read the memory of a task, so anything may be in it."""

import json
from typing import Any

import pytest

from fluster.cli.jobs import without_ours
from fluster_bus.messages.stacks import StackFrame
from fluster_services.worker.stacks import ReplyBudget, parsed, problem_of


def thread(name: str | None, frames: int, **changes: Any) -> dict[str, Any]:
    frame = {"name": "f", "filename": "/a.py", "line": 1}
    return {"thread_name": name, "active": False, "owns_gil": False, "frames": [frame] * frames, **changes}


def told(*threads: dict[str, Any]) -> bytes:
    return json.dumps(threads).encode()


def test_the_main_thread_comes_first() -> None:
    budget = ReplyBudget()
    found = parsed(told(thread(None, 1), thread("MainThread", 2, active=True, owns_gil=True)), budget)
    assert [(each.name, len(each.frames), each.is_active, each.holds_gil) for each in found] == [
        ("MainThread", 2, True, True),
        ("", 1, False, False),
    ]
    assert not budget.is_exceeded


def test_what_is_told_is_bounded() -> None:
    budget = ReplyBudget()
    name = "x" * 10_000
    found = parsed(told(*(thread(name, 500) for _ in range(500))), budget)
    assert (len(found), sum(len(each.frames) for each in found), budget.is_exceeded) == (64, 2_000, True)
    assert len(found[0].name) == 300
    assert sum(len(each.frames) for each in parsed(told(thread("next", 5)), budget)) == 0


@pytest.mark.parametrize(
    "output", [b"", b"{", b"[1]", b'[{"thread_name": "x"}]', told({**thread("x", 1), "frames": 3})]
)
def test_anything_else_is_refused(output: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        parsed(output, ReplyBudget())


@pytest.mark.parametrize(
    "words", ["Error: Permission Denied: Try", "Error: x\n 0: Operation not permitted (os error 1)"]
)
def test_a_kernel_that_forbids_it_is_told_with_the_remedy(words: str) -> None:
    assert "root" in problem_of(words)
    assert "no Python was found in it: Error: Failed to find python" in problem_of("\nError: Failed to find python\nx")


def test_only_the_users_functions_are_shown_unless_there_are_none() -> None:
    def frame(function: str, file: str) -> StackFrame:
        return StackFrame(function=function, file=file, line=1)

    ours = [
        frame("_call", "/venv/fluster_services/worker/task/task_process.py"),
        frame("run_keeper", "/venv/fluster_services/worker/keeper/keeper.py"),
        frame("_run_module_as_main", "<frozen runpy>"),
    ]
    users = [frame("wait", "/venv/fluster/actors/pool/pool.py"), frame("train", "/home/ada/train.py")]
    assert without_ours([*users, *ours]) == users, "what they call is shown, whosever it is"
    assert without_ours(users) == users
    assert without_ours(ours) == ours
    assert without_ours([]) == []
