"""What a worker has claimed: each attempt from its claim to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets
from fluster_bus.messages import JobRecord, JobStatus, Namespace, TaskRecord
from fluster_bus.storage.tables import Row
from fluster_services.capacity import needed
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.following import Follower, forget, give_up, is_of_the_bus
from fluster_services.worker.attempts.gpu_watch import GpuWatch
from fluster_services.worker.attempts.holds import Holds
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.attempts.pumps import ProgressPump
from fluster_services.worker.attempts.starting import Starter, leaving_before_the_end
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.faults import WorkerFaultError
from fluster_services.worker.contract.runtime import RunningTask, Runtime
from fluster_services.worker.engine_images import Images
from fluster_services.worker.gpus.allocator import GpuAllocator
from fluster_services.worker.presence.presence import Presence
from fluster_services.worker.presence.wellness import Wellness


class Attempts:
    """What one worker has: prepared, started, followed and told. `cover` is awaited when there is room again, `change` when
    the worker has become unfit to run anything, or fit again, and `change_gpus` when other GPUs of its are given to no task than before.

    Whatever a worker does, also when it ends in the middle: an attempt is reported as not started only if no code of it ever ran.
    """

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        runtime: Runtime,
        *,
        claims: Claims,
        ledger: Ledger,
        presence: Presence,
        progress: ProgressPump,
        cover: Callable[[], Awaitable[None]],
        change: Callable[[], Awaitable[None]],
        change_gpus: Callable[[], Awaitable[None]],
        allocator: GpuAllocator,
        images: Images | None = None,
    ) -> None:
        self._worker_id = config.worker_id
        self._timing = config.timing
        self._runtime = runtime
        self._claims = claims
        self._ledger = ledger
        self._cover = cover
        self.running: dict[str, RunningTask] = {}  # {attempt key: what runs}
        self.array_ids: dict[str, int] = {}  # {attempt key: its FLUSTER_ARRAY_ID}, of tasks of arrays
        self.wellness = Wellness(
            config.worker_id,
            config.state_dir,
            runtime,
            config.limits.disk,
            examine=self._examine,
            places=self._places,
            running=self.running,
            grace_s=config.timing.kill_grace_s,
            on_change=change,
        )
        self.gpus = GpuWatch(
            config.worker_id,
            allocator,
            ledger,
            running=self.running,
            grace_s=config.timing.kill_grace_s,
            on_change=change_gpus,
        )
        self._holds = Holds(
            bus,
            self._claims,
            namespaces=tuple(config.job_credentials),
            host=config.advertised_host,
            expiry_s=max(config.timing.hold_s, 2 * config.timing.heartbeat_s),
        )
        self._starter = Starter(
            bus,
            config,
            runtime,
            claims=claims,
            holds=self._holds,
            gpus=self.gpus,
            presence=presence,
            progress=progress,
            images=images,
            give_back=self.give_back,
            note_array=self._note_array,
            why_unstarted=self.wellness.why_unstarted,
        )
        self._follower = Follower(
            bus,
            claims,
            progress,
            why_ended=self.wellness.why_ended,
            on_gpu_taken=self.gpus.on_taken,
            on_over=self._on_over,
            give_back=self.give_back,
            obey=self.obey,
        )
        self._is_handing_back = False

    def on_devices(self, kind: str) -> None:
        """This worker has found devices."""
        self._starter.on_devices(kind)

    async def serve(self, namespace: Namespace, credentials: BusAddress) -> None:
        """Be able to start what jobs of that namespace need. Raises OSError, AddressError when their credentials cannot be kept."""
        await self._starter.serve(namespace, credentials)
        self._holds.serve(namespace)

    async def open(self) -> None:
        """Make ready what attempts need to be started. What the disk has no room for is made up for by looks at the machine."""
        await self._starter.open()

    def _examine(self) -> str | None:
        return self._starter.examine() or self._runtime.examine()

    def _places(self) -> list[Path]:
        return [*self._starter.places(), *self._runtime.places()]

    async def close(self) -> None:
        """Stop what is being prepared."""
        await self._starter.close()

    def unsettled(self) -> list[str]:
        """The keys of those that run, or wait for what they need."""
        return [*self.running, *self._starter.preparing]

    def renew(self, fence_in_s: float) -> None:
        """A controller has answered: what runs is stopped if none does within that time."""
        self._holds.on_heard()
        self._runtime.renew(fence_in_s + self._timing.kill_grace_s + self._timing.heartbeat_s / 2)
        for running in self.running.values():
            if running.spec.fence_after_s is not None:
                running.renew(fence_in_s)

    def hold(self, record: TaskRecord, running: RunningTask) -> None:
        """Note what an attempt has that an earlier run of this worker started."""
        self._ledger.hold(running.key, needed(record.resources), running.spec.devices or None)
        self._starter.hold(running.key, running.spec)
        self._note_array(running.key, running.spec.array_id)

    def _note_array(self, key: str, array_id: int | None) -> None:
        if isinstance(array_id, int):  # a task can write over the file that has it
            self.array_ids[key] = array_id

    def hand_back(self) -> None:
        """Have all of them end, to be tried elsewhere, since this worker leaves."""
        self._is_handing_back = True
        for running in self.running.values():
            self._hand_back(running)
        self._starter.hand_back()

    def _hand_back(self, running: RunningTask) -> None:
        running.kill(self._timing.kill_grace_s, leaving_before_the_end(self._worker_id), preempted=True)

    async def give_up(self, row: Row[TaskRecord], why: str) -> None:
        """Write the end of what is this worker's by its record, and which it does not have; a hold is released at no cost."""
        record = row.value
        if record.gang and record.state is JobStatus.BUILDING and await self._holds.give_up(row, why):
            return
        await self._claims.end(row, JobStatus.WORKER_FAILED, why)

    def drop(self, key: str) -> None:
        """Stop an attempt whose record was deleted."""
        self._starter.stop(key)
        if key in self.running:
            self.running[key].kill(0.0, "its record was deleted")

    def obey(self, record: TaskRecord) -> None:
        """Stop what the record says is to be stopped: a wish, or an attempt that has a successor."""
        grace_s = 0.0 if record.kill_at_once else self._timing.kill_grace_s
        for number in range(1, record.attempt + 1):
            key = buckets.attempt_key(record.namespace, record.job_id, record.task, number)
            running, wish = self.running.get(key), record.kill_requested or record.restart_requested
            if wish is not None or not self._claims.is_mine(record, number):
                self._starter.stop(key)
            if running is None:
                continue
            if not self._claims.is_mine(record, number):
                running.kill(0.0, "superseded by a newer attempt")
            elif wish is not None:
                running.kill(grace_s, wish)

    async def give_back(self, key: str) -> None:
        """The capacity is free again, and offers for it are listened to."""
        self._starter.release(key)
        self.array_ids.pop(key, None)
        if self._ledger.release(key):
            await self._cover()

    # ---- from the claim to the end -----------------------------------------------------------------------

    async def start(self, row: Row[TaskRecord], key: str, job: JobRecord | None) -> None:
        """See an attempt that was claimed to its end. Cancelled, what has begun is left for `adopt` of the next runtime."""
        await self._contained(row, key, self._start(row, key, job))

    async def _start(self, row: Row[TaskRecord], key: str, job: JobRecord | None) -> None:
        started = await self._starter.start(row, key, job)
        if started is not None:
            row, running = started
            await self.see_through(row, key, running, adopted=False)

    async def see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        """See an attempt that was started to its end, and tell it."""
        await self._contained(row, key, self._see_through(row, key, running, adopted=adopted), running)

    async def _see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        self.running[key] = running
        if self._is_handing_back:
            self._hand_back(running)
        await self._follower.see_through(row, key, running, adopted=adopted)

    def _on_over(self, key: str) -> None:
        del self.running[key]

    async def _contained(
        self, row: Row[TaskRecord], key: str, work: Coroutine[object, None, None], running: RunningTask | None = None
    ) -> None:
        """What one attempt has left, or is, must not end the worker, and again each of its successors that adopts it."""
        try:
            await work
        except WorkerFaultError:
            raise
        except Exception as error:
            if is_of_the_bus(error):
                raise
            outcome = give_up(key, running, error)
            self.running.pop(key, None)
            await self.give_back(key)
            await self._claims.end(row, outcome.state, outcome.reason)
            if running is not None:
                await forget(running)
