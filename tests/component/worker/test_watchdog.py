"""What the last who can end tasks does not touch."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fluster_bus.running.fence_clock import boot_id, fence_clock
from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, SPEC_FILE, append_json, write_json
from fluster_services.worker.contract.attempt_records import LaunchSpec, to_json
from fluster_services.worker.keeper import watchdog
from fluster_services.worker.keeper.leftovers import kill_keeper, start_note
from fluster_services.worker.keeper.watchdog import Watchdog
from tests.waiting import wait_until

LATER_S = 60.0


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def note(pid: int, *, started_since_boot_s: float) -> dict[str, object]:
    """What a keeper writes when it starts its task."""
    return {
        "keeper_pid": pid,
        "task_pid": pid,
        "started_at": 0.0,
        "started_since_boot_s": started_since_boot_s,
        "boot_id": boot_id(),
    }


def test_a_stranger_with_the_number_of_a_dead_keeper_is_left_alone(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_OWNER_GONE_S", 0.0)
    directory = tmp_path / "attempt"
    directory.mkdir()
    spec = LaunchSpec(key="default.job.0.1", command=["true"])
    write_json(directory / SPEC_FILE, to_json(spec))
    started = note(process.pid, started_since_boot_s=fence_clock() - LATER_S)
    with selectors.DefaultSelector() as selector:
        dog = Watchdog(selector)
        dog.on_start(directory, spec)
        dog.on_owner_gone()
        append_json(directory / KEEPER_FILE, {"started": started})  # by a keeper that died since

        def is_over() -> bool:
            dog.fire()
            return not directory.exists()

        wait_until(is_over, describe=lambda: list(tmp_path.iterdir()))
    assert process.poll() is None


_SPOILED: dict[str, Callable[[Path], object]] = {
    "a list": lambda path: path.write_text("[]"),
    "a text": lambda path: path.write_text('"x"'),
    "no JSON": lambda path: path.write_bytes(b"\xff{"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "nothing": lambda path: path.write_bytes(b""),
    "no key": lambda path: path.write_text('{"key": ""}'),
    "other types": lambda path: path.write_text('{"key": "k", "groups": 5, "fence_after_s": "x"}'),
    "other limits": lambda path: path.write_text('{"key": "k", "limits": [1]}'),
    "another container": lambda path: path.write_text('{"key": "k", "container": "x"}'),
    "odd groups": lambda path: path.write_text(json.dumps({"key": "k", "groups": {"a\0b": 1, str(path.parent): []}})),
    "a pipe": os.mkfifo,
    "a link": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.mark.parametrize("spoil", _SPOILED.values(), ids=_SPOILED)
def test_a_task_that_writes_over_what_it_is_started_by_is_ended_as_any_other(
    spoil: Callable[[Path], object],
    process: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog, "_OWNER_GONE_S", 0.0)
    directory = tmp_path / "attempt"
    directory.mkdir()
    append_json(directory / KEEPER_FILE, {"started": note(process.pid, started_since_boot_s=fence_clock())})
    (directory / "cgroup.procs").write_text("none of them is a number")
    spoil(directory / SPEC_FILE)
    with selectors.DefaultSelector() as selector:
        dog = Watchdog(selector)
        dog.renew(tmp_path, fence_clock() + LATER_S)
        dog.on_owner_gone()

        def is_over() -> bool:
            dog.fire()
            return not directory.exists()

        wait_until(is_over, describe=lambda: list(tmp_path.iterdir()))
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("pid", [-1, 0, 1, 1 << 31, 1 << 63, 1 << 70])
def test_a_note_with_a_number_that_no_process_has_is_none(pid: int, tmp_path: Path) -> None:
    append_json(tmp_path / KEEPER_FILE, {"started": note(pid, started_since_boot_s=fence_clock())})
    assert start_note(tmp_path) is None


def test_a_keeper_is_killed(process: subprocess.Popen[bytes]) -> None:
    kill_keeper(note(process.pid, started_since_boot_s=fence_clock()))
    assert process.wait() == -9


def test_one_that_is_over_and_taken_in_needs_nothing(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    kill_keeper(note(process.pid, started_since_boot_s=fence_clock()))
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
