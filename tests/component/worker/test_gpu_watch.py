"""What a worker does about its GPUs between two looks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fluster_bus.messages import Capacity, WorkerId
from fluster_services.worker.attempts.gpu_watch import GpuWatch
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.gpus.allocator import GpuAllocator
from fluster_services.worker.gpus.inventory import Gpu, GpuInventory, GpuProcess
from fluster_services.worker.gpus.locks import GpuLock, lock_path
from fluster_services.worker.gpus.reader import GpuReader

pytestmark = pytest.mark.anyio

GIB = 1 << 30
UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
NEED = Capacity(cpu=1, memory=GIB, device="gpu", variant="h100", devices=1, tasks=1)


class _Reader(GpuReader):
    """One whose driver is not asked: it has been asked already."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None  # done once, while GPUs are read
        self.processes: tuple[GpuProcess, ...] = ()

    async def read(self) -> GpuInventory:
        self.reads += 1
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return GpuInventory("nvml", (Gpu(index=0, uuid=UUID, model="NVIDIA H100", processes=self.processes),))


def _watch(ledger: Ledger, reader: GpuReader, folder: Path, *, keeps_apart: bool = False) -> GpuWatch:
    async def on_change() -> None: ...

    allocator = GpuAllocator(reader, lock_folder=str(folder / "locks"), keeps_apart=keeps_apart)
    return GpuWatch(WorkerId("w1"), allocator, ledger, running={}, grace_s=1.0, on_change=on_change)


def _ledger(*ids: str) -> Ledger:
    return Ledger(Capacity(cpu=4, memory=GIB, device="gpu", variant="h100", devices=len(ids)), ids)


async def test_what_is_known_by_its_uuid_asks_no_driver_before_the_first_heartbeat(tmp_path: Path) -> None:
    """A restarted worker of a local cluster has adopted a task, and has not found its GPUs yet."""
    reader, ledger = _Reader(), Ledger(Capacity(cpu=4, memory=GIB))
    ledger.hold("ns.job.0.1", NEED, (UUID,))
    await _watch(ledger, reader, tmp_path).learn_names()
    assert reader.reads == 0


async def test_what_an_earlier_version_knew_by_index_is_known_by_its_uuid(tmp_path: Path) -> None:
    reader, ledger = _Reader(), _ledger(UUID)
    ledger.hold("ns.job.0.1", NEED, ("0",))
    await _watch(ledger, reader, tmp_path).learn_names()
    assert (reader.reads, ledger.devices("ns.job.0.1")) == (1, (UUID,))


async def test_a_gpu_that_was_given_during_a_look_is_not_withheld_for_it(tmp_path: Path) -> None:
    """Its lock is held when the look comes to it, by the keeper of a task that has ended when the look is over."""
    reader, ledger = _Reader(), _ledger(UUID)
    watch = _watch(ledger, reader, tmp_path)
    lock = GpuLock(lock_path(tmp_path / "locks", UUID))

    async def give() -> None:
        assert ledger.reserve("ns.job.0.1", NEED)
        await watch.lease("ns.job.0.1")
        lock.take(gone="")
        ledger.release("ns.job.0.1")

    reader.meanwhile = give
    await watch.look()
    assert watch.withheld == {}
    await watch.look()
    assert list(watch.withheld) == [UUID]
    lock.close()


@pytest.mark.parametrize("keeps_apart", [True, False])
async def test_a_gpu_in_which_a_program_computes_that_is_no_task(tmp_path: Path, *, keeps_apart: bool) -> None:
    """It is given to no task where the machine is the cluster's; on a user's own machine that is a warning."""
    reader, ledger = _Reader(), _ledger(UUID)
    watch = _watch(ledger, reader, tmp_path, keeps_apart=keeps_apart)
    who = f"process {1 << 22}, which is not of a task, holds more than 1 GiB of its memory"
    reader.processes = (GpuProcess(1 << 22, 2 * GIB),)
    for _ in range(2):
        await watch.look()
        assert (watch.withheld, watch.problems(), ledger.free.devices) == ({}, [], 1)
    await watch.look()
    if keeps_apart:
        assert (watch.withheld, ledger.free.devices) == ({UUID: f"{who}: end it"}, 0)
        assert watch.problems() == [f"GPU 0 ({UUID}) is given to no task: {who}: end it"]
    else:
        assert (watch.withheld, ledger.free.devices) == ({}, 1)
        assert watch.problems() == [f"GPU 0 ({UUID}) is given to tasks although {who}"]
    reader.processes = ()
    await watch.look()
    assert (watch.withheld, watch.problems(), ledger.free.devices) == ({}, [], 1)


async def test_what_a_task_s_own_gpu_has_is_none_of_this(tmp_path: Path) -> None:
    reader, ledger = _Reader(), _ledger(UUID)
    watch = _watch(ledger, reader, tmp_path, keeps_apart=True)
    reader.processes = (GpuProcess(1 << 22, 2 * GIB),)
    assert ledger.reserve("ns.job.0.1", NEED)
    for _ in range(4):
        await watch.look()
    assert (watch.withheld, watch.problems()) == ({}, [])
    ledger.release("ns.job.0.1")
    await watch.look()
    assert watch.withheld == {}, "a task that has just ended frees its memory a moment later"
