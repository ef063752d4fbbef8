"""Says in one sentence why a job is not running, from what the controller knows at this moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from fluster_bus.core.names import no_worker_named
from fluster_bus.messages import Capacity, JobRecord, JobStatus, TaskRecord, WorkerId
from fluster_bus.messages.parts.arrays import number_in
from fluster_bus.messages.parts.counted import number_text
from fluster_bus.messages.parts.resources import as_words, worker_named
from fluster_services import capacity, gangs, job_lifecycle, lifecycle
from fluster_services.controller.state.worker_index import WorkerView

_NO_WORKER = "there is no worker now that takes work"
_NAMED = 3  # workers or jobs that are named before the rest is counted


def explain(
    job: JobRecord,
    tasks: Sequence[TaskRecord],
    workers: Sequence[WorkerView],
    *,
    ahead: int,
    now: float,
    waits_for: Sequence[tuple[str, JobStatus]] = (),
    reservation: tuple[str, Sequence[str]] | None = None,
    pauses_s: Mapping[int, float] = MappingProxyType({}),
    children: Sequence[str] = (),
    troubles: Sequence[tuple[str, str]] = (),
    withheld: Sequence[tuple[str, str]] = (),
    unfit: Mapping[WorkerId, str] = MappingProxyType({}),
    preparing: Mapping[int, str] = MappingProxyType({}),
    short_of_quota: str | None = None,
    goes_first: str | None = None,
    registered: Collection[WorkerId] | None = None,
) -> str:
    """Why the job stands where it stands. `workers` are those that live; `ahead` tasks are before its own in the line;
    `waits_for` has the jobs that it runs after and that have not ended, and how they stand; `reservation` a job that
    others have overtaken for too long, and the workers that are kept free for it;
    `pauses_s` the tasks whose pause before their next attempt is not over, and how long it takes yet; `children` the jobs
    that have not ended of those that its ended attempts launched; `troubles` the workers that take no work for the time
    being, and why; `withheld` the GPUs that workers give to no task, and why; `unfit` those that lack what the job names, and why they decline it; `preparing` the tasks of which is known
    what is being done before they can start; `short_of_quota` why the quota of its namespace has no room for it, and `goes_first`
    which other namespace does, and why; None when that is not so; `registered` all workers that are known, where they are.
    """
    if job.state.finished() and not job.is_over:
        return "it is to take the place of a job that has ended, and waits for what that one launched"
    if job.state.finished():
        return _how_ended(job)
    waiting = [task for task in tasks if task.state is JobStatus.PENDING]
    held = [task for task in tasks if lifecycle.is_held(task)]
    if job.kill_requested is not None:
        return f"it is being stopped ({job.kill_requested}); {len(held)} of its tasks have not ended yet"
    if job_lifecycle.awaits_others(job):
        return _why_not_released(waits_for)
    if job.request.gang and any(task.epoch > job.epoch for task in held):
        ready = sum(task.is_ready for task in held)
        return f"its gang is being gathered: {len(held)} of {len(tasks)} tasks are held, {ready} of them ready"
    if children and not waiting and any(task.state.finished() and not lifecycle.is_final(task) for task in tasks):
        return f"its next attempt begins when what it launched has ended: {_listed(children)}"
    if held and not waiting:
        return _where_held(held, len(tasks), preparing, now)
    if not waiting:
        end = job_lifecycle.finish_job(job, tasks, now=now)
        return "its end is being written" + (f": {_how_ended(end)}" if end is not None else "")
    offered = [task for task in waiting if task.task not in pauses_s]
    if not offered or (job.request.gang and len(offered) < len(waiting)):
        return _why_paused(job, waiting, pauses_s)
    at_once = job.request.array.at_once if job.request.array is not None else None
    if at_once is not None and len(held) >= at_once:
        return (
            f"{len(waiting)} of {len(tasks)} tasks wait, since at most {at_once} may run at once ({job.request.array})"
        )
    waiting = offered
    named = worker_named(as_words(job.request.resources.labels))
    if named is not None and registered is not None and named not in registered:
        return f"{no_worker_named(named, registered)} (it waits until one of that name comes)"
    if short_of_quota is not None:
        return short_of_quota + _retried(job, waiting, now)
    why = _why_gang_waits if job.request.gang else _why_waiting
    fit = [worker for worker in workers if worker.name not in unfit]
    waits = (
        why(waiting, fit, ahead)
        + (f"; {goes_first}" if goes_first is not None else "")
        + _in_trouble(troubles)
        + _withheld(job, withheld)
        + _lacking(unfit)
    )
    return waits + _kept_free(job, reservation) + _retried(job, waiting, now)


def why_given_up(task: TaskRecord, workers: Sequence[WorkerView], short_of_quota: str | None = None) -> str:
    """Why a task is given up whose scheduling timeout is over, with what it needs if no worker could ever have run it."""
    reason = f"no worker had room for it within {task.scheduling_timeout_s:g} s"
    if short_of_quota is not None:
        return f"it could not be started within {task.scheduling_timeout_s:g} s: {short_of_quota}"
    need = capacity.needed(task.resources, task.namespace)
    if any(capacity.fits(need, worker.total) for worker in workers):
        return reason
    return f"{reason}: {_why_waiting([task], workers, 0)}"


def _where_held(held: Sequence[TaskRecord], count: int, preparing: Mapping[int, str], now: float) -> str:
    """Where its tasks are, and what those are waiting for that do not run yet."""
    parts = []
    building = [task for task in held if task.state is JobStatus.BUILDING]
    running = [task for task in held if task.state is not JobStatus.BUILDING]
    if running:
        parts.append(f"{len(running)} of {count} tasks run on {_places(running)}")
    if building:
        oldest = min(building, key=lambda task: task.transitions[-1].time if task.transitions else now)
        since = oldest.transitions[-1].time if oldest.transitions else now
        parts.append(
            f"{len(building)} of {count} tasks are being prepared on {_places(building)}, since {max(0.0, now - since):.0f} s"
        )
    told = list(dict.fromkeys(preparing[task.task] for task in building if preparing.get(task.task)))
    return f"it is not waiting: {', '.join(parts)}" + (f": {_listed(told)}" if told else "")


def _places(tasks: Sequence[TaskRecord]) -> str:
    return _listed(sorted({str(task.worker_id) for task in tasks}))


def _how_ended(job: JobRecord) -> str:
    return f"it ended as {job.state}" + (f": {job.error_message}" if job.error_message else "")


def _why_paused(job: JobRecord, waiting: Sequence[TaskRecord], pauses_s: Mapping[int, float]) -> str:
    paused = [task for task in waiting if task.task in pauses_s]
    # A gang begins when the last of its tasks may, others with the first of theirs.
    decides = max if job.request.gang else min
    task = decides(paused, key=lambda task: pauses_s[task.task])
    before = f"attempt {task.attempt}"
    if job.request.replicas > 1:
        before += f" of task {number_in(job.request.array, task.task)}"
    ends = [each.reason for each in task.transitions if each.attempt == task.attempt - 1 and each.state.finished()]
    return f"waits {pauses_s[task.task]:.1f} s before {before}" + (f", after: {ends[-1]}" if ends else "")


def _why_gang_waits(waiting: Sequence[TaskRecord], workers: Sequence[WorkerView], ahead: int) -> str:
    need, count = capacity.needed(waiting[0].resources, waiting[0].namespace), len(waiting)
    told = gangs.describe_need(need, count)
    if not workers:
        return f"{told}; {_NO_WORKER}"
    fitting = len(gangs.assign(need, count, [(worker.name, worker.total) for worker in workers]))
    if fitting < count:
        return f"{told}; all workers together, empty, fit {fitting}"
    fitting = len(gangs.assign(need, count, [(worker.name, worker.free) for worker in workers]))
    if fitting < count:
        return f"{told}; only {fitting} fit now; {_position(ahead)}"
    return f"{told}; there is room, and it is being gathered; {_position(ahead)}"


def _why_not_released(waits_for: Sequence[tuple[str, JobStatus]]) -> str:
    if not waits_for:
        return "what it was to run after has ended, and it is being released"
    if len(waits_for) == 1:
        name, state = waits_for[0]
        return f"waits for job {name}, which is {state}"
    return f"waits for {len(waits_for)} jobs: {_listed([f'{name} ({state})' for name, state in waits_for])}"


def _why_waiting(waiting: Sequence[TaskRecord], workers: Sequence[WorkerView], ahead: int) -> str:
    need = capacity.needed(waiting[0].resources, waiting[0].namespace)
    if not workers:
        return f"needs {capacity.describe(need)}; {_NO_WORKER}"
    fitting = [worker for worker in workers if capacity.fits(need, worker.total)]
    if not fitting:
        return capacity.misfit(need, [(worker.name, worker.total) for worker in workers])
    line = _position(ahead)
    names = _listed([worker.name for worker in fitting])
    with_room = [worker for worker in fitting if capacity.fits(need, worker.free)]
    if with_room and all(worker.is_away for worker in with_room):
        away = _listed([worker.name for worker in with_room])
        until = "it: offered again once it is heard" if len(with_room) == 1 else "them: offered again once one is heard"
        return f"needs {capacity.describe(need)}; there is room on {away}, but no connection to {until}; {line}"
    if with_room:
        return f"needs {capacity.describe(need)}; there is room on {names}, and it is being offered; {line}"
    busy = _busy(need, fitting)
    jobs = sorted({job for worker in fitting for job in worker.jobs})
    return f"fits {names}; {busy} busy with {_listed(jobs) if jobs else 'something else'}; {line}"


def _position(ahead: int) -> str:
    return f"{ahead} tasks are before it" if ahead > 1 else "one task is before it" if ahead else "next in line"


def _lacking(unfit: Mapping[WorkerId, str]) -> str:
    if not unfit:
        return ""
    return "".join(f"; {reason}" for reason in sorted(unfit.values())) + " (asked again from time to time)"


def _in_trouble(troubles: Sequence[tuple[str, str]]) -> str:
    told = [f"worker {name} takes no work: {trouble}" for name, trouble in troubles[:_NAMED]]
    more = [f"{len(troubles) - _NAMED} more take none"] if len(troubles) > _NAMED else []
    return "".join(f"; {each}" for each in (*told, *more))


def _withheld(job: JobRecord, withheld: Sequence[tuple[str, str]]) -> str:
    if job.request.resources.device.kind != "gpu":
        return ""
    told = [f"on worker {name}, {why}" for name, why in withheld[:_NAMED]]
    more = [f"{len(withheld) - _NAMED} more GPUs are withheld"] if len(withheld) > _NAMED else []
    return "".join(f"; {each}" for each in (*told, *more))


def _kept_free(job: JobRecord, reservation: tuple[str, Sequence[str]] | None) -> str:
    if reservation is None:
        return ""
    name, workers = reservation
    are_kept = f"{_listed(workers)} {'is' if len(workers) == 1 else 'are'} kept free for"
    if name == job.job_id:
        return f"; others have overtaken it for long, so {are_kept} it"
    return f"; {are_kept} {name}, which waits for longer"


def _busy(need: Capacity, workers: Sequence[WorkerView]) -> str:
    """What of the workers is taken, in the kind that is short."""
    cpu = sum(worker.total.cpu - worker.free.cpu for worker in workers)
    memory = sum(worker.total.memory - worker.free.memory for worker in workers)
    counts = [(capacity.device_count(worker.total), capacity.device_count(worker.free)) for worker in workers]
    devices = sum(total - free for total, free in counts)
    if (need.tasks or 0) and all(worker.free.tasks == 0 for worker in workers):
        most = sum(worker.total.tasks or 0 for worker in workers)
        return f"{most} of {most} tasks that may run there at once are"
    if need.devices and not any(capacity.has_devices(need, worker.free) for worker in workers):
        return f"{devices} of {sum(total for total, _ in counts)} {need.device}s are"
    for name, count in need.resources:
        left = [dict(worker.free.resources).get(name, 0) for worker in workers]
        if all(count > each for each in left):
            of = sum(dict(worker.total.resources).get(name, 0) for worker in workers)
            return f"{number_text(of - sum(left))} of {number_text(of)} {name} are"
    if all(need.cpu > worker.free.cpu for worker in workers):
        return f"{cpu:g} of {sum(worker.total.cpu for worker in workers):g} CPUs are"
    total = capacity.describe_bytes(sum(worker.total.memory for worker in workers))
    return f"{capacity.describe_bytes(memory)} of {total} memory are"


def _retried(job: JobRecord, waiting: Sequence[TaskRecord], now: float) -> str:
    tried = [task for task in waiting if task.attempt > job.first_attempt and task.transitions]
    if not tried:
        return ""
    newest = max(tried, key=lambda task: task.transitions[-1].time)
    ago = max(0.0, now - newest.transitions[-1].time)
    return f" ({newest.transitions[-1].reason}, {ago:.0f} s ago)"


def _listed(names: Sequence[str]) -> str:
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
