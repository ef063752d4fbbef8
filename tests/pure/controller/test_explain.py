from __future__ import annotations

import pytest

from fluster_bus.core.names import no_worker_named
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    JobId,
    JobRecord,
    JobRequest,
    JobStatus,
    Namespace,
    ResourceConfig,
    TaskRecord,
    WorkerId,
)
from fluster_bus.messages.parts.resources import GIB, WORKER_LABEL
from fluster_services import job_lifecycle, lifecycle
from fluster_services.controller.scheduling.explain import explain, why_given_up
from fluster_services.controller.state.worker_index import WorkerView

NOW = 1_000.0


def view(
    name: str, cpu: float, *, free: float | None = None, jobs: tuple[str, ...] = (), is_away: bool = False
) -> WorkerView:
    return WorkerView(
        name,
        Capacity(cpu=cpu, memory=16 * GIB),
        Capacity(cpu=cpu if free is None else free, memory=16 * GIB),
        jobs,
        is_away,
    )


def pending(cpu: float = 1, *, replicas: int = 1) -> JobRecord:
    request = JobRequest(
        name="train",
        entrypoint=Entrypoint(command=("true",)),
        resources=ResourceConfig.with_cpu(cpu),
        replicas=replicas,
    )
    return job_lifecycle.new_job(Namespace("default"), JobId("train-1"), request, order=1, now=NOW)


@pytest.mark.parametrize(
    ("cpu", "workers", "ahead", "said"),
    [
        (1, [], 0, "needs 1 CPU, 1 GiB memory; there is no worker now that takes work"),
        (
            8,
            [view("w1", 2), view("w3", 4)],
            0,
            "needs 8 CPUs, 1 GiB memory; the largest worker, w3, has 4 CPUs, 16 GiB memory",
        ),
        (
            2,
            [view("w1", 4, free=0, jobs=("a", "b")), view("w2", 4, free=1, jobs=("c",)), view("w0", 1)],
            0,
            "fits w1 and w2; 7 of 8 CPUs are busy with a, b and c; next in line",
        ),
        (2, [view("w1", 4, free=0, jobs=("a",))], 3, "fits w1; 4 of 4 CPUs are busy with a; 3 tasks are before it"),
        (
            2,
            [view("w1", 4)],
            1,
            "needs 2 CPUs, 1 GiB memory; there is room on w1, and it is being offered; one task is before it",
        ),
        (
            2,
            [view("w1", 4, is_away=True), view("w2", 4, free=1), view("w3", 4, is_away=True)],
            0,
            (
                "needs 2 CPUs, 1 GiB memory; there is room on w1 and w3, but no connection to them: "
                "offered again once one is heard; next in line"
            ),
        ),
        (
            2,
            [view("w1", 4, is_away=True)],
            0,
            "needs 2 CPUs, 1 GiB memory; there is room on w1, but no connection to it: offered again once it is heard; next in line",
        ),
        (
            2,
            [view("w1", 4, is_away=True), view("w2", 4)],
            0,
            "needs 2 CPUs, 1 GiB memory; there is room on w1 and w2, and it is being offered; next in line",
        ),
    ],
)
def test_a_waiting_job_is_told_what_it_waits_for(cpu: float, workers: list[WorkerView], ahead: int, said: str) -> None:
    job = pending(cpu)
    assert explain(job, job_lifecycle.new_tasks(job), workers, ahead=ahead, now=NOW) == said


def test_what_is_counted_by_another_name_is_busy_or_nowhere() -> None:
    job = pending(1)
    resources = ResourceConfig.with_cpu(1, resources={"license": 2})
    job = job.model_copy(update={"request": job.request.model_copy(update={"resources": resources})})
    total = Capacity(cpu=4, memory=16 * GIB, resources=(("license", 3.0),))
    busy = WorkerView("w1", total, total.model_copy(update={"resources": (("license", 1.0),)}), ("a",))
    assert explain(job, job_lifecycle.new_tasks(job), [busy], ahead=0, now=NOW) == (
        "fits w1; 2 of 3 license are busy with a; next in line"
    )
    assert explain(job, job_lifecycle.new_tasks(job), [view("w2", 4)], ahead=0, now=NOW) == (
        "needs 1 CPU, 1 GiB memory, license: 2; no worker has license: 2 (the most any has is 0)"
    )


def test_a_worker_that_has_as_many_tasks_as_it_may_is_busy() -> None:
    job = pending(1)
    total = Capacity(cpu=4, memory=16 * GIB, tasks=2)
    full = WorkerView("w1", total, Capacity(cpu=2, memory=14 * GIB, tasks=0), ("a",))
    assert explain(job, job_lifecycle.new_tasks(job), [full], ahead=0, now=NOW) == (
        "fits w1; 2 of 2 tasks that may run there at once are busy with a; next in line"
    )


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([view("w1", 4, free=0)], "no worker had room for it within 2 s"),
        (
            [view("w1", 1)],
            (
                "no worker had room for it within 2 s: "
                "needs 2 CPUs, 1 GiB memory; the largest worker, w1, has 1 CPU, 16 GiB memory"
            ),
        ),
        (
            [],
            "no worker had room for it within 2 s: needs 2 CPUs, 1 GiB memory; there is no worker now that takes work",
        ),
    ],
)
def test_a_task_that_was_given_up_says_what_no_worker_has(workers: list[WorkerView], said: str) -> None:
    task = job_lifecycle.new_tasks(pending(2))[0].model_copy(update={"scheduling_timeout_s": 2.0})
    assert why_given_up(task, workers) == said


def test_the_kind_that_is_short_is_named() -> None:
    job = pending(1)
    full = WorkerView("w1", Capacity(cpu=4, memory=GIB), Capacity(cpu=4, memory=0), ("a",))
    assert explain(job, job_lifecycle.new_tasks(job), [full], ahead=0, now=NOW) == (
        "fits w1; 1 GiB of 1 GiB memory are busy with a; next in line"
    )


def test_a_retry_says_what_went_before() -> None:
    job = pending()
    (task,) = job_lifecycle.new_tasks(job)
    worker = WorkerId("w1")
    claimed = lifecycle.claim(task, attempt=1, worker_id=worker, now=NOW)
    assert claimed is not None
    lost = lifecycle.lose_worker(claimed, worker_id=worker, now=NOW, reason="gone")
    assert lost is not None
    again = lifecycle.retry(lost, now=NOW)
    assert again is not None
    said = explain(job, [again], [view("w1", 4, free=0, jobs=("a",))], ahead=0, now=NOW + 7)
    assert said.endswith("(retry 1 of 100 after WORKER_FAILED, 7 s ago)")


def _failed_once(job: JobRecord, task: TaskRecord) -> TaskRecord:
    worker = WorkerId("w1")
    held = lifecycle.claim(task, attempt=1, worker_id=worker, now=NOW, epoch=1 if task.gang else 0)
    assert held is not None
    failed = lifecycle.end(held, attempt=1, worker_id=worker, now=NOW, state=JobStatus.FAILED, reason="exit code 3")
    assert failed is not None
    again = lifecycle.retry(failed, now=NOW)
    assert again is not None
    return again


@pytest.mark.parametrize("gang", [False, True])
def test_a_task_whose_pause_is_not_over_says_so(gang: bool) -> None:
    request = pending().request.model_copy(update={"max_retries_failure": 1, "gang": gang})

    def said(replicas: int, pauses_s: dict[int, float]) -> str:
        of_job = request.model_copy(update={"replicas": replicas})
        job = job_lifecycle.new_job(Namespace("default"), JobId("train-1"), of_job, order=1, now=NOW)
        tasks = [_failed_once(job, task) for task in job_lifecycle.new_tasks(job)]
        return explain(job, tasks, [view("w1", 4)], ahead=0, now=NOW, pauses_s=pauses_s)

    assert said(1, {0: 3.21}) == "waits 3.2 s before attempt 2, after: exit code 3"
    slowest, first = "waits 7.0 s before attempt 2 of task 1", "waits 3.0 s before attempt 2 of task 0"
    assert said(2, {0: 3, 1: 7}) == f"{slowest if gang else first}, after: exit code 3"
    one_ready = said(2, {1: 7})
    assert one_ready.startswith(slowest) if gang else "it is being offered" in one_ready


def test_a_job_that_does_not_wait_says_so() -> None:
    job = pending(replicas=2)
    tasks = job_lifecycle.new_tasks(job)
    held = [task for each in tasks if (task := lifecycle.claim(each, attempt=1, worker_id=WorkerId("w1"), now=NOW))]
    run = [task for each in held if (task := lifecycle.run(each, attempt=1, worker_id=WorkerId("w1"), now=NOW))]

    def said(tasks: list[TaskRecord], preparing: dict[int, str]) -> str:
        return explain(job, tasks, [view("w1", 4)], ahead=0, now=NOW + 7, preparing=preparing)

    assert said(run, {}) == "it is not waiting: 2 of 2 tasks run on w1"
    assert said(held, {}) == "it is not waiting: 2 of 2 tasks are being prepared on w1, since 7 s"
    pulling = {1: "pulling image a: 1 of 2 GiB"}
    assert said([run[0], held[1]], pulling) == (
        "it is not waiting: 1 of 2 tasks run on w1, 1 of 2 tasks are being prepared on w1, since 7 s: "
        "pulling image a: 1 of 2 GiB"
    )


def test_an_ended_job_says_how() -> None:
    job = pending()
    killed = [lifecycle.request_kill(task, now=NOW, reason="enough") for task in job_lifecycle.new_tasks(job)]
    ended = job_lifecycle.finish_job(job, [task for task in killed if task is not None], now=NOW)
    assert ended is not None
    assert ended.state is JobStatus.KILLED
    assert explain(ended, [], [], ahead=0, now=NOW) == "it ended as KILLED: enough"


def test_an_end_that_is_not_written_yet_is_told_all_the_same() -> None:
    job = pending()
    given_up = [
        lifecycle.give_up(task, now=NOW, reason="no worker has zone=c") for task in job_lifecycle.new_tasks(job)
    ]
    tasks = [task for task in given_up if task is not None]
    said = explain(job, tasks, [view("w1", 4)], ahead=0, now=NOW)
    assert said == "its end is being written: it ended as UNSCHEDULABLE: no worker has zone=c"


def test_a_job_that_is_being_stopped_says_so() -> None:
    job = pending()
    wanted = job_lifecycle.request_job_kill(job, reason="enough")
    assert wanted is not None
    assert "being stopped (enough)" in explain(wanted, job_lifecycle.new_tasks(job), [], ahead=0, now=NOW)


def test_whom_a_worker_is_kept_free_for_is_said() -> None:
    job = pending()

    def said(name: str, *kept_free: str) -> str:
        workers = [view("w1", 4, free=0, jobs=("a",))]
        return explain(job, job_lifecycle.new_tasks(job), workers, ahead=0, now=NOW, reservation=(name, kept_free))

    assert said("train-1", "w1").endswith(
        "; next in line; others have overtaken it for long, so w1 is kept free for it"
    )
    assert said("large", "w1").endswith("; next in line; w1 is kept free for large, which waits for longer")
    assert said("gang", "w1", "w2").endswith("; next in line; w1 and w2 are kept free for gang, which waits for longer")


def test_workers_that_lack_what_a_job_names_are_not_counted_on() -> None:
    job = pending()
    workers = [view("w1", 4), view("w2", 4, free=0, jobs=("a",))]
    unfit = {WorkerId("w1"): "worker w1 has no folder '/data'"}
    told = explain(job, job_lifecycle.new_tasks(job), workers, ahead=0, now=NOW, unfit=unfit)
    assert (
        told
        == "fits w2; 4 of 4 CPUs are busy with a; next in line; worker w1 has no folder '/data' (asked again from time to time)"
    )


def test_a_quota_that_has_no_room_is_what_it_waits_for() -> None:
    job = pending(2)
    (task,) = job_lifecycle.new_tasks(job)
    short = "waits for the quota of namespace team-a: 8 of 8 CPUs are used"
    workers = [view("w1", 4)]
    assert explain(job, [task], workers, ahead=0, now=NOW, short_of_quota=short) == short
    timed = task.model_copy(update={"scheduling_timeout_s": 60.0})
    assert why_given_up(timed, workers, short) == f"it could not be started within 60 s: {short}"


def test_who_goes_first_is_told_beside_what_it_waits_for() -> None:
    job = pending(2)
    first = "namespace team-b goes first: it holds 10 % of the cluster, team-a 60 %, equal weights"
    said = explain(job, job_lifecycle.new_tasks(job), [view("w1", 4, free=0)], ahead=0, now=NOW, goes_first=first)
    assert said == f"fits w1; 4 of 4 CPUs are busy with something else; next in line; {first}"


def test_a_worker_that_has_not_been_seen_is_told_with_those_like_it() -> None:
    job = pending()
    resources = job.request.resources.model_copy(update={"labels": {WORKER_LABEL: "wroker-1"}})
    job = job.model_copy(update={"request": job.request.model_copy(update={"resources": resources})})
    tasks, known = job_lifecycle.new_tasks(job), {WorkerId("worker-1"), WorkerId("gpu-box")}

    def said(*names: str) -> str:
        return explain(job, tasks, [view("worker-1", 4)], ahead=0, now=NOW, registered={*known, *map(WorkerId, names)})

    assert said() == (
        "no worker named 'wroker-1' has been seen; did you mean 'worker-1'? (it waits until one of that name comes)"
    )
    assert (
        said("wroker-1")
        == "needs 1 CPU, 1 GiB memory, worker wroker-1; no worker wroker-1 takes work now (worker-1 does)"
    )
    assert no_worker_named("box", []) == "no worker named 'box' has been seen"
