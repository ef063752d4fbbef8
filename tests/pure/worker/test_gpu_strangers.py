"""Programs on a GPU that no task has: which count, and after how many looks."""

import os

import pytest

from fluster_services.worker.gpus.holders import LOOKS, MANY_BYTES, Strangers, StrangerWatch, strangers_on
from fluster_services.worker.gpus.inventory import Gpu, GpuProcess
from fluster_services.worker.linux.processes import process_name

GIB = 1 << 30
NO_PID = 1 << 22  # above what a kernel gives


@pytest.mark.parametrize(
    ("processes", "used", "found"),
    [
        pytest.param(None, 9 * GIB, None, id="not-told"),
        pytest.param((), 9 * GIB, None, id="nothing"),
        pytest.param((GpuProcess(NO_PID, MANY_BYTES),), 9 * GIB, None, id="little"),
        pytest.param(
            (GpuProcess(NO_PID, GIB), GpuProcess(NO_PID + 1, 1)), 0, ((NO_PID, NO_PID + 1), GIB + 1), id="sum"
        ),
        pytest.param(
            (GpuProcess(NO_PID + 1), GpuProcess(NO_PID, 1)), 2 * GIB, ((NO_PID, NO_PID + 1), 2 * GIB), id="all"
        ),
        pytest.param((GpuProcess(NO_PID),), None, None, id="nothing-known"),
    ],
)
def test_who_holds_much_memory_is_found(
    processes: tuple[GpuProcess, ...] | None, used: int | None, found: tuple[tuple[int, ...], int] | None
) -> None:
    said = strangers_on(Gpu(0, processes=processes, memory_used=used))
    assert (None if said is None else (said.pids, said.memory)) == found
    assert said is None or not said.has_server


def test_a_server_that_others_compute_in_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_name(os.getpid())
    assert process_name(NO_PID) is None
    gpu = Gpu(0, processes=(GpuProcess(7, 2 * GIB),))
    for name, has_server in (("nvidia-cuda-mps", True), ("python", False), (None, False)):
        monkeypatch.setattr("fluster_services.worker.gpus.holders.process_name", lambda _pid, name=name: name)
        found = strangers_on(gpu)
        assert found is not None
        assert found.has_server is has_server


def test_only_those_that_stay_for_some_looks_count() -> None:
    watch, who = StrangerWatch(), Strangers((7,), 2 * GIB)
    assert [watch.on_look({"a": who}) for _ in range(LOOKS)] == [*[{}] * (LOOKS - 1), {"a": who}]
    assert watch.on_look({"a": who, "b": who}) == {"a": who}
    assert watch.on_look({}) == {}
    assert watch.on_look({"a": who}) == {}, "counted anew"


def test_words() -> None:
    assert (
        Strangers((7,), 3 * GIB).described() == "process 7, which is not of a task, holds more than 1 GiB of its memory"
    )
    many = Strangers(tuple(range(1, 8)), 3 * GIB)
    assert many.described() == "processes 1, 2, 3, 4, 5 …, which are not of a task, hold more than 1 GiB of its memory"
    assert (Strangers((7,), 0).them, many.them) == ("it", "them")
