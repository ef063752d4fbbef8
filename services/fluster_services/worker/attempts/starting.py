"""Has the attempts that a worker claimed ready, and starts them: from the claim to the start."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import AddressError, BusError
from fluster_bus.messages import JobRecord, JobStatus, Namespace, TaskRecord, WorkerId
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.stored_messages import SecretStore
from fluster_bus.storage.tables import Row
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.gpu_watch import GpuWatch
from fluster_services.worker.attempts.holds import Holds
from fluster_services.worker.attempts.launch import Launcher
from fluster_services.worker.attempts.preparation import Preparation, Prepared
from fluster_services.worker.attempts.pumps import PreparationLog, ProgressPump
from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.faults import BuildError, LaunchError
from fluster_services.worker.contract.outcome import Outcome, gpu_taken
from fluster_services.worker.contract.runtime import RunningTask, Runtime
from fluster_services.worker.engine_images import Images
from fluster_services.worker.gpus.allocator import DRIVER_FILE
from fluster_services.worker.gpus.locks import GpuTakenError
from fluster_services.worker.keeper.template import TemplateDiedError
from fluster_services.worker.presence.presence import Presence

log = logging.getLogger(__name__)

_BRIEF_S = 0.5  # for what is there already; an image may have been pulled, or built

Result = TypeVar("Result")

WhyUnstarted = Callable[[Exception, Callable[[], Awaitable[None]]], Awaitable[Outcome]]


def leaving_before_the_end(worker_id: WorkerId) -> str:
    """Why an attempt of a worker that leaves is to be tried elsewhere."""
    return f"worker {worker_id} left before it was over"


class Starter:
    """Starts what was claimed. `give_back` frees an attempt's capacity, `note_array` is called with its element of an array.

    An attempt that is not to start is ended in its record: `why_unstarted` says how, given the error and a function that
    returns when what was made for the attempt is gone again.
    """

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        runtime: Runtime,
        *,
        claims: Claims,
        holds: Holds,
        gpus: GpuWatch,
        presence: Presence,
        progress: ProgressPump,
        images: Images | None,
        give_back: Callable[[str], Awaitable[None]],
        note_array: Callable[[str, int | None], None],
        why_unstarted: WhyUnstarted,
    ) -> None:
        self._bus = bus
        self._state_dir = config.state_dir
        self._left = leaving_before_the_end(config.worker_id)
        self._runtime = runtime
        self._claims = claims
        self._holds = holds
        self._gpus = gpus
        self._presence = presence
        self._progress = progress
        self._give_back = give_back
        self._note_array = note_array
        self._why_unstarted = why_unstarted
        self._launcher = Launcher(
            worker_id=config.worker_id,
            credentials=config.job_credentials,
            credentials_dir=config.state_dir / "credentials",
            timing=config.timing,
            limits=config.limits,
            working_dir=config.working_dir,
            python_path=config.python_path,
            device_kind=_device_kind(config),
            in_containers=images is not None,
            inherits_devices=config.environment is not None,
        )
        self._preparation = Preparation(
            config.state_dir,
            functools.partial(ObjectStore, bus),
            functools.partial(SecretStore, bus),
            config.limits,
            images,
            build_timeout_s=config.build_timeout_s,
        )
        # {attempt key: when the last heartbeat before the record was seen to be this worker's was sent}. A later one proves
        # nothing about it: the task may have been given away between the two.
        self._fence_since: dict[str, float] = {}
        self._preparing: dict[str, asyncio.Task[Any]] = {}  # {attempt key: what it waits for}
        self._is_handing_back = False
        self._is_ready = False

    def on_devices(self, kind: str) -> None:
        """This worker has found devices."""
        self._launcher = dataclasses.replace(self._launcher, device_kind=kind)

    async def serve(self, namespace: Namespace, credentials: BusAddress) -> None:
        """Be able to start what jobs of that namespace need. Raises OSError, AddressError when their credentials cannot be kept."""
        known = {**self._launcher.credentials, namespace: credentials}
        launcher = dataclasses.replace(self._launcher, credentials=known)
        await asyncio.to_thread(launcher.prepare)
        # What it had found meanwhile, such as devices, is the newer one's.
        self._launcher = dataclasses.replace(self._launcher, credentials=known)

    async def open(self) -> None:
        """Make ready what attempts need to be started. What the disk has no room for is made up for by `examine`."""
        await asyncio.to_thread(self._make_ready)
        self._preparation.open()

    def _make_ready(self) -> str | None:
        """Why nothing can be started yet; to be called in a thread."""
        if not self._is_ready:
            try:
                self._launcher.prepare()
                self._preparation.open_caches()
            except (OSError, AddressError) as error:
                return f"its state folder {self._state_dir} is not ready: {error}"
            self._is_ready = True
        return None

    def examine(self) -> str | None:
        """Why nothing can be prepared; None when all can. To be called in a thread."""
        return self._make_ready() or self._preparation.examine()

    def places(self) -> list[Path]:
        """Where what attempts need is made. To be called in a thread."""
        return [self._state_dir, *self._preparation.places()]

    async def close(self) -> None:
        """Stop what is being prepared."""
        await self._preparation.close()

    @property
    def preparing(self) -> list[str]:
        """The keys of those that wait for what they need."""
        return list(self._preparing)

    def hold(self, key: str, spec: LaunchSpec) -> None:
        """Keep what an attempt uses that an earlier run of this worker started."""
        self._preparation.hold(key, spec)

    def release(self, key: str) -> None:
        """What an attempt used may go: it is over, or is not to start."""
        self._holds.close(key)
        self._fence_since.pop(key, None)
        self._preparation.release(key)

    def stop(self, key: str) -> None:
        """Have an attempt look again whether it is still wanted, in place of what it waits for."""
        preparing = self._preparing.get(key)
        if preparing is not None:
            preparing.cancel()

    def hand_back(self) -> None:
        """Have all that did not start yet end, to be tried elsewhere, since this worker leaves."""
        self._is_handing_back = True
        for preparing in self._preparing.values():
            preparing.cancel()

    async def start(
        self, row: Row[TaskRecord], key: str, job: JobRecord | None
    ) -> tuple[Row[TaskRecord], RunningTask] | None:
        """The attempt that was started, and its record by then; None when it did not start, and its end is written.

        Raises TemplateDiedError when nothing more can be started.
        """
        self._fence_since[key] = self._presence.heard_at
        record = row.value
        if record.gang:
            self._holds.open(key, record, on_off=lambda: self.stop(key))
        try:
            if job is None or job.order != record.order:  # of an earlier job with that id, from a replica that lags
                job = await self._claims.job(record.namespace, record.job_id)
            if job is None or job.order != record.order:
                raise LaunchError(f"job {record.job_id} was deleted")
            self._note_array(key, job.request.array.ids[record.task] if job.request.array is not None else None)
            found = await self._prepared(row, job, key)
            if found is None:
                return None
            row, prepared = found
            if record.gang:
                job = await self._wait_go(row, key)
                if job is None:
                    return None
            began_at = time.monotonic()
            lease = await self._gpus.lease(key)
            if (
                time.monotonic() - began_at >= _BRIEF_S
            ):  # a driver that hangs at one GPU holds up those who ask for others
                wanted = await self._still_wanted(row, key)
                if wanted is None:
                    return None
                row = wanted
            spec, payload = self._launcher.spec(row.value, job, prepared, lease)
            # This process may be stopped at any point, also here: the keeper looks at the clock itself.
            since = self._fence_since.pop(key)
            if spec.fence_after_s is not None:
                spec = dataclasses.replace(spec, fence_at=since + spec.fence_after_s)
            running = await self._runtime.start(spec, payload)
        except TemplateDiedError:
            # Nothing more can be started here: a new worker process, with a new template, adopts what runs.
            reason = "its worker has to be started again"
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, reason, is_spared=True))
            raise
        except GpuTakenError as error:
            log.warning("%s is given back: %s", key, error)
            reason = gpu_taken(str(error))
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, reason, is_spared=True))
            return None
        except BusError as error:
            log.warning("%s could not be started: %s", key, error)
            reason = f"could not be started: {error}"
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, reason))
            return None
        except Exception as error:
            # A task with an unforeseen error must not take the worker down, again at each of its attempts.
            is_known = isinstance(error, (LaunchError, OSError))
            log.warning("%s could not be started: %s", key, error, exc_info=None if is_known else error)
            outcome = await self._why_unstarted(error, self._preparation.settled)
            await self._end_unstarted(row, key, outcome)
            return None
        return row, running

    async def _prepared(
        self, row: Row[TaskRecord], job: JobRecord, key: str
    ) -> tuple[Row[TaskRecord], Prepared] | None:
        """What the attempt needs, and its record after that; None when it is no longer wanted, and that is settled."""
        record = row.value
        while True:
            began_at = time.monotonic()
            prepared = await self._prepare(record, job, key)
            is_fresh = time.monotonic() - began_at < _BRIEF_S and self._presence.was_heard_lately
            if self._is_handing_back:
                await self._hand_back_unstarted(row, key)
                return None
            if prepared == Prepared() and is_fresh:
                return row, prepared
            latest = await self._still_wanted(row, key)
            if latest is None:
                return None
            if prepared is not None:
                return latest, prepared

    async def _still_wanted(self, row: Row[TaskRecord], key: str) -> Row[TaskRecord] | None:
        """The record after something that took its time, in which the task may have been given to another worker, or
        stopped; None when it is no longer wanted, and that is settled.
        """
        record = row.value
        await self._presence.wait_heard()
        self._fence_since[key] = self._presence.heard_at
        latest = await self._claims.patiently(lambda: self._claims.look(record.namespace, record.job_id, record.task))
        if latest is None or not self._claims.is_mine(latest.value, record.attempt):
            await self._give_back(key)
            return None
        wish = latest.value.kill_requested or latest.value.restart_requested
        if wish is not None:
            await self._end_unstarted(latest, key, Outcome(JobStatus.KILLED, wish))
            return None
        if record.gang and self._holds.is_off(key):
            await self._give_back(key)
            await self._claims.release(latest, f"released: not all tasks of epoch {record.epoch} could be held")
            return None
        return latest

    async def _wait_go(self, row: Row[TaskRecord], key: str) -> JobRecord | None:
        """The job's record that lets this task of a gang start; None when it is not to start, and that is settled."""
        while True:
            decision = await self._interruptible(self._holds.wait_go(key, row), key)
            if self._is_handing_back:
                await self._hand_back_unstarted(row, key)
                return None
            latest = await self._still_wanted(row, key)
            if latest is None:
                return None
            if decision is not None:
                return decision
            row = latest

    async def _hand_back_unstarted(self, row: Row[TaskRecord], key: str) -> None:
        """Give up an attempt since this worker leaves; a hold, under which nothing was to start yet, at no cost."""
        await self._give_back(key)
        if not row.value.gang or not await self._holds.give_up(row, self._left):
            await self._claims.end(row, JobStatus.WORKER_FAILED, self._left)

    async def _prepare(self, record: TaskRecord, job: JobRecord, key: str) -> Prepared | None:
        """What the attempt needs; None when that was given up on the word of `stop`."""
        on_doing = functools.partial(self._progress.tell_preparing, key, record)
        async with PreparationLog(self._bus, record, on_doing) as log_of_it:
            try:
                earlier = await self._earlier_image(record, job)
                work = self._preparation.prepare(
                    record.namespace, job.request, key, log_of_it.follow, earlier_image=earlier
                )
                return await self._interruptible(work, key)
            except BuildError as error:
                log_of_it.follow(error.output)  # it may have been made for others alone
                raise
            finally:
                self._progress.forget(key)

    async def _earlier_image(self, record: TaskRecord, job: JobRecord) -> UsedImage | None:
        """What the job's image meant to the attempt before, or to the first task: a tag may mean another by now."""
        if job.request.environment.image is None:
            return None
        if record.image is not None or record.task == 0:
            return record.image
        first = await self._claims.look(record.namespace, record.job_id, 0)
        return first.value.image if first is not None and first.value.order == record.order else None

    async def _interruptible(self, work: Coroutine[object, None, Result], key: str) -> Result | None:
        """What comes of `work`; None when it was given up: on the word of `stop`, or since this worker leaves."""
        if self._is_handing_back:  # whatever was there when that began got the request; this did not
            work.close()
            return None
        preparing = self._preparing[key] = asyncio.create_task(work)
        try:
            await asyncio.wait({preparing})
        finally:
            del self._preparing[key]
            preparing.cancel()
        return None if preparing.cancelled() else preparing.result()

    async def _end_unstarted(self, row: Row[TaskRecord], key: str, outcome: Outcome) -> None:
        await self._give_back(key)
        if outcome.is_spared and row.value.gang and await self._holds.give_up(row, outcome.reason):
            return
        await self._claims.end(
            row,
            outcome.state,
            outcome.reason,
            is_spared=outcome.is_spared,
            filled_disk=outcome.filled_disk,
            has_output=outcome.has_output,
        )


def _device_kind(config: WorkerConfig) -> str:
    """The variables that tell tasks about devices: also that there are none for them where GPUs may yet be found."""
    is_looking = config.detected_share is not None and DRIVER_FILE.exists()
    return "gpu" if is_looking else config.total.device
