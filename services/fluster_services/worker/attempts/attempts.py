"""What a worker has claimed: each attempt from its claim to its end."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import AddressError, BusError
from fluster_bus.messages import JobRecord, JobStatus, Namespace, TaskRecord
from fluster_bus.messages.parts.images import UsedImage
from fluster_bus.storage.objects import ObjectStore
from fluster_bus.storage.registry import Registry
from fluster_bus.storage.stored_messages import SecretStore
from fluster_bus.storage.tables import Row
from fluster_services.capacity import needed
from fluster_services.worker.attempts.claims import Claims
from fluster_services.worker.attempts.following import follow, forget, give_up, is_of_the_bus
from fluster_services.worker.attempts.holds import Holds
from fluster_services.worker.attempts.launch import Launcher
from fluster_services.worker.attempts.ledger import Ledger
from fluster_services.worker.attempts.preparation import Preparation, Prepared
from fluster_services.worker.attempts.pumps import LogPump, PreparationLog, ProgressPump, publish_result
from fluster_services.worker.contract.build_output import BuildError
from fluster_services.worker.contract.config import WorkerConfig
from fluster_services.worker.contract.outcome import Outcome
from fluster_services.worker.contract.runtime import LaunchError, RunningTask, Runtime, WorkerFaultError
from fluster_services.worker.engine.images import Images
from fluster_services.worker.keeper.template import TemplateDiedError
from fluster_services.worker.presence.presence import Presence
from fluster_services.worker.presence.wellness import Wellness

log = logging.getLogger(__name__)

_MOMENT_S = 0.05  # shorter than anybody watches
_BRIEF_S = 0.5  # for what is there already; an image may have been pulled, or built

Result = TypeVar("Result")


class Attempts:
    """What one worker has: prepared, started, followed and told. `cover` is awaited when there is room again, `change` when
    the worker has become unfit to run anything, or fit again.

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
        images: Images | None = None,
    ) -> None:
        self._bus = bus
        self._config = config
        self._runtime = runtime
        self._claims = claims
        self._ledger = ledger
        self._presence = presence
        self._progress = progress
        self._cover = cover
        namespaces = tuple(config.job_credentials)
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
        self._registries = {namespace: Registry(bus, namespace) for namespace in namespaces}
        self._holds = Holds(
            bus,
            self._claims,
            namespaces=namespaces,
            host=config.advertised_host,
            expiry_s=max(config.timing.hold_s, 2 * config.timing.heartbeat_s),
        )
        self._launcher = Launcher(
            worker_id=config.worker_id,
            credentials=config.job_credentials,
            credentials_dir=config.state_dir / "credentials",
            timing=config.timing,
            limits=config.limits,
            working_dir=config.working_dir,
            python_path=config.python_path,
            device_kind=config.total.device,
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
        self._registries[namespace] = Registry(self._bus, namespace)
        self._holds.serve(namespace)

    async def open(self) -> None:
        """Make ready what attempts need to be started. What the disk has no room for is made up for by `_examine`."""
        await asyncio.to_thread(self._make_ready)
        self._preparation.open()

    def _make_ready(self) -> str | None:
        """Why nothing can be started yet; to be called in a thread."""
        if not self._is_ready:
            try:
                self._launcher.prepare()
                self._preparation.open_caches()
            except (OSError, AddressError) as error:
                return f"its state folder {self._config.state_dir} is not ready: {error}"
            self._is_ready = True
        return None

    def _examine(self) -> str | None:
        return self._make_ready() or self._preparation.examine() or self._runtime.examine()

    def _places(self) -> list[Path]:
        return [self._config.state_dir, *self._preparation.places(), *self._runtime.places()]

    async def close(self) -> None:
        """Stop what is being prepared."""
        await self._preparation.close()

    def unsettled(self) -> list[str]:
        """The keys of those that run, or wait for what they need."""
        return [*self.running, *self._preparing]

    def renew(self, fence_in_s: float) -> None:
        """A controller has answered: what runs is stopped if none does within that time."""
        self._holds.on_heard()
        timing = self._config.timing
        self._runtime.renew(fence_in_s + timing.kill_grace_s + timing.heartbeat_s / 2)
        for running in self.running.values():
            if running.spec.fence_after_s is not None:
                running.renew(fence_in_s)

    def hold(self, record: TaskRecord, running: RunningTask) -> None:
        """Note what an attempt has that an earlier run of this worker started."""
        self._ledger.hold(running.key, needed(record.resources), running.spec.devices or None)
        self._preparation.hold(running.key, running.spec)
        self._note_array(running.key, running.spec.array_id)

    def _note_array(self, key: str, array_id: int | None) -> None:
        if isinstance(array_id, int):  # a task can write over the file that has it
            self.array_ids[key] = array_id

    def hand_back(self) -> None:
        """Have all of them end, to be tried elsewhere, since this worker leaves."""
        self._is_handing_back = True
        for running in self.running.values():
            self._hand_back(running)
        for preparing in self._preparing.values():
            preparing.cancel()

    def _hand_back(self, running: RunningTask) -> None:
        running.kill(self._config.timing.kill_grace_s, self._left, preempted=True)

    @property
    def _left(self) -> str:
        return f"worker {self._config.worker_id} left before it was over"

    async def give_up(self, row: Row[TaskRecord], why: str) -> None:
        """Write the end of what is this worker's by its record, and which it does not have; a hold is released at no cost."""
        record = row.value
        if record.gang and record.state is JobStatus.BUILDING and await self._holds.give_up(row, why):
            return
        await self._claims.end(row, JobStatus.WORKER_FAILED, why)

    def drop(self, key: str) -> None:
        """Stop an attempt that has no record any more."""
        self._stop_preparing(key)
        if key in self.running:
            self.running[key].kill(0.0, "it has no record any more")

    def obey(self, record: TaskRecord) -> None:
        """Stop what the record says is to be stopped: a wish, or an attempt that is not the newest any more."""
        grace_s = 0.0 if record.kill_at_once else self._config.timing.kill_grace_s
        for number in range(1, record.attempt + 1):
            key = subjects.attempt_key(record.namespace, record.job_id, record.task, number)
            running, wish = self.running.get(key), record.kill_requested or record.restart_requested
            if wish is not None or not self._claims.is_mine(record, number):
                self._stop_preparing(key)
            if running is None:
                continue
            if not self._claims.is_mine(record, number):
                running.kill(0.0, "superseded by a newer attempt")
            elif wish is not None:
                running.kill(grace_s, wish)

    async def give_back(self, key: str) -> None:
        """The capacity is free again, and offers for it are listened to."""
        self._holds.close(key)
        self.array_ids.pop(key, None)
        self._fence_since.pop(key, None)
        self._preparation.release(key)
        if self._ledger.release(key):
            await self._cover()

    # ---- from the claim to the start --------------------------------------------------------------------

    async def start(self, row: Row[TaskRecord], key: str, job: JobRecord | None) -> None:
        """See an attempt that was claimed to its end. Cancelled, what has begun is left for `adopt` of the next runtime."""
        await self._contained(row, key, self._start(row, key, job))

    async def see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        """See an attempt that was started to its end, and tell it."""
        await self._contained(row, key, self._see_through(row, key, running, adopted=adopted), running)

    async def _contained(
        self, row: Row[TaskRecord], key: str, work: Coroutine[Any, Any, None], running: RunningTask | None = None
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

    async def _start(self, row: Row[TaskRecord], key: str, job: JobRecord | None) -> None:
        self._fence_since[key] = self._presence.heard_at
        record = row.value
        if record.gang:
            self._holds.open(key, record, on_off=lambda: self._stop_preparing(key))
        try:
            if job is None or job.order != record.order:  # of whoever had the id before, from a replica that lags
                job = await self._claims.job(record.namespace, record.job_id)
            if job is None or job.order != record.order:
                raise LaunchError(f"job {record.job_id} has no record any more")
            self._note_array(key, job.request.array.ids[record.task] if job.request.array is not None else None)
            found = await self._prepared(row, job, key)
            if found is None:
                return
            row, prepared = found
            if record.gang:
                job = await self._wait_go(row, key)
                if job is None:
                    return
            spec, payload = self._launcher.spec(row.value, job, prepared, self._ledger.devices(key))
            # This process may be stopped at any point, also here: the keeper looks at the clock itself.
            since = self._fence_since.pop(key)
            if spec.fence_after_s is not None:
                spec = dataclasses.replace(spec, fence_at=since + spec.fence_after_s)
            running = await self._runtime.start(spec, payload)
        except TemplateDiedError:
            # Nothing can be started here any more: a new worker process, with a new template, adopts what runs.
            reason = "its worker has to be started again"
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, reason, is_spared=True))
            raise
        except BusError as error:
            log.warning("%s could not be started: %s", key, error)
            reason = f"could not be started: {error}"
            await self._end_unstarted(row, key, Outcome(JobStatus.WORKER_FAILED, reason))
            return
        except Exception as error:
            # One task that nobody thought of must not take the worker down, again at each of its attempts.
            is_known = isinstance(error, (LaunchError, OSError))
            log.warning("%s could not be started: %s", key, error, exc_info=None if is_known else error)
            outcome = await self.wellness.why_unstarted(error, self._preparation.settled)
            await self._end_unstarted(row, key, outcome)
            return
        await self.see_through(row, key, running, adopted=False)

    async def _prepared(
        self, row: Row[TaskRecord], job: JobRecord, key: str
    ) -> tuple[Row[TaskRecord], Prepared] | None:
        """What the attempt needs, and its record after that; None when it is not wanted any more, and that is settled."""
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
        """The record after something that took its time, in which the task may have been given to somebody else, or
        stopped; None when it is not wanted any more, and that is settled.
        """
        record = row.value
        await self._presence.wait_heard()
        self._fence_since[key] = self._presence.heard_at
        latest = await self._claims.patiently(lambda: self._claims.look(record.namespace, record.job_id, record.task))
        if latest is None or not self._claims.is_mine(latest.value, record.attempt):
            await self.give_back(key)
            return None
        wish = latest.value.kill_requested or latest.value.restart_requested
        if wish is not None:
            await self._end_unstarted(latest, key, Outcome(JobStatus.KILLED, wish))
            return None
        if record.gang and self._holds.is_off(key):
            await self.give_back(key)
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
        await self.give_back(key)
        if not row.value.gang or not await self._holds.give_up(row, self._left):
            await self._claims.end(row, JobStatus.WORKER_FAILED, self._left)

    async def _prepare(self, record: TaskRecord, job: JobRecord, key: str) -> Prepared | None:
        """What the attempt needs; None when that was given up on the word of `_obey`."""
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

    async def _interruptible(self, work: Coroutine[Any, Any, Result], key: str) -> Result | None:
        """What comes of `work`; None when it was given up: on the word of `_stop_preparing`, or since this worker leaves."""
        if self._is_handing_back:  # whatever was there when that began was told; this was not
            work.close()
            return None
        preparing = self._preparing[key] = asyncio.create_task(work)
        try:
            await asyncio.wait({preparing})
        finally:
            del self._preparing[key]
            preparing.cancel()
        return None if preparing.cancelled() else preparing.result()

    def _stop_preparing(self, key: str) -> None:
        preparing = self._preparing.get(key)
        if preparing is not None:
            preparing.cancel()

    # ---- from the start to the end ----------------------------------------------------------------------

    async def _see_through(self, row: Row[TaskRecord], key: str, running: RunningTask, *, adopted: bool) -> None:
        self.running[key] = running
        if self._is_handing_back:
            self._hand_back(running)
        started_at = time.time()
        row, outcome = await self._followed(row, key, running, started_at, adopted=adopted)
        del self.running[key]
        # Joined before the end is written: whoever reads the end and offers the next task finds somebody listening.
        await asyncio.gather(self._remove_endpoints(row.value, outcome.reason), self.give_back(key))
        result = await publish_result(self._bus, row.value, running, outcome.result)
        if not await self._claims.end(
            row,
            outcome.state,
            outcome.reason,
            exit_code=outcome.exit_code,
            error=outcome.error,
            started_at=started_at,
            last_words=outcome.last_words,
            result=result,
            progress=outcome.progress,
            is_spared=outcome.is_spared,
            filled_disk=outcome.filled_disk,
            image=_used_image(running),
        ):
            log.info("%s ended as %s, and is not this worker's any more", key, outcome.state)
        await forget(running)

    async def _followed(
        self, row: Row[TaskRecord], key: str, running: RunningTask, started_at: float, *, adopted: bool
    ) -> tuple[Row[TaskRecord], Outcome]:
        """How an attempt ended, and its record by then."""
        is_over = asyncio.get_running_loop().create_future()
        tell_running = asyncio.create_task(self._tell_running(row, is_over, started_at, _used_image(running)))

        async def speak() -> None:
            """Before anybody can read what it says, its record says that it runs."""
            if not is_over.done():
                is_over.set_result(False)
            await asyncio.wait({tell_running})

        try:
            pump = LogPump(self._bus, row.value, running)
            try:
                if adopted:
                    await pump.resume()
                on_progress = functools.partial(self._progress.tell, key, row.value)
                outcome = await follow(running, pump, on_progress=on_progress, before_output=speak)
                outcome = await self.wellness.why_ended(key, outcome)
            except Exception as error:
                if is_of_the_bus(error):
                    raise
                # What one task has left where it is read must not end the worker, and again each of its successors.
                outcome = give_up(key, running, error)
            if not is_over.done():
                is_over.set_result(True)
            return await tell_running, outcome
        finally:
            tell_running.cancel()
            self._progress.forget(key)

    async def _tell_running(
        self, row: Row[TaskRecord], is_over: asyncio.Future[bool], started_at: float, image: UsedImage | None
    ) -> Row[TaskRecord]:
        """Write that it runs, unless it is silent and over in a moment: then that is written together with its end."""
        try:
            async with asyncio.timeout(_MOMENT_S):
                if await asyncio.shield(is_over):
                    return row
        except TimeoutError:
            pass
        row = await self._claims.run(row, started_at=started_at, image=image)
        if row.value.state is JobStatus.BUILDING:  # it could not be written: the task was given to somebody else
            record = row.value
            latest = await self._claims.patiently(
                lambda: self._claims.look(record.namespace, record.job_id, record.task)
            )
            if latest is not None:
                self.obey(latest.value)
        self.obey(row.value)  # what was wished while it was being started
        return row

    async def _end_unstarted(self, row: Row[TaskRecord], key: str, outcome: Outcome) -> None:
        await self.give_back(key)
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

    async def _remove_endpoints(self, record: TaskRecord, reason: str) -> None:
        """Whatever the attempt registered is gone with it; callers learn of it at once."""
        registry = self._registries[record.namespace]
        keys = subjects.endpoints_of_attempt(record.job_id, record.task, record.attempt)
        try:
            async with aclosing(registry.table.each(keys)) as rows:  # there may be as many as its task has written
                async for row in rows:
                    await registry.table.delete(row.key, reason=reason)
        except BusError as error:
            log.info("endpoints of %s are left to the controller: %s", record.job_id, error)


def _used_image(running: RunningTask) -> UsedImage | None:
    """What it runs in. That it was adopted with may have been written over."""
    try:
        return UsedImage.model_validate(running.spec.used_image) if running.spec.used_image is not None else None
    except ValidationError:
        return None
