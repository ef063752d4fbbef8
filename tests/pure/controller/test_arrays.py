"""Arrays: which tasks there are, and which have a slot."""

import random

import pytest
from pydantic import ValidationError

from fluster_bus.messages import Entrypoint, JobId, JobInfo, JobRequest, JobStatus, Namespace
from fluster_bus.messages.parts.arrays import TaskArray
from fluster_services.controller.scheduling.order import TaskSlots
from fluster_services.controller.state.job_index import JobKey

JOB = JobKey(Namespace("default"), JobId("job"))


@pytest.mark.parametrize(
    ("text", "ids", "at_once"),
    [
        ("0-99", range(100), None),
        ("0-99:10", range(0, 100, 10), None),
        ("3-10:4%2", range(3, 11, 4), 2),
        ("7", range(7, 8), None),
        (range(1, 10, 2), range(1, 10, 2), None),
    ],
)
def test_an_array_has_the_tasks_that_its_text_names(text: str | range, ids: range, at_once: int | None) -> None:
    request = JobRequest(name="a", entrypoint=Entrypoint(command=("true",)), array=text)  # type: ignore[arg-type]
    again = JobRequest.from_json(request.to_json())
    assert again == request
    assert again.array is not None
    assert (list(again.array.ids), again.array.at_once, again.replicas) == (list(ids), at_once, len(ids))


@pytest.mark.parametrize("text", ["", "a-b", "5-2", "0-9%0", "0-9:0", "-1", range(0), range(-3, 3)])
def test_what_is_no_array_is_refused(text: str | range) -> None:
    with pytest.raises(ValidationError, match=r"array|greater than"):
        TaskArray.model_validate(text)


def test_an_array_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValidationError, match="has 10,001 tasks: a job has at most 10,000"):
        JobRequest(name="a", entrypoint=Entrypoint(command=("true",)), array="0-10000")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_no_more_than_the_limit_have_a_turn_and_all_get_one(seed: int) -> None:
    rng = random.Random(seed)
    slots, limit, count = TaskSlots(), rng.randint(1, 4), rng.randint(1, 12)
    unfinished, active = set(range(count)), set(rng.sample(range(count), min(limit, count, rng.randint(0, 3))))
    held = tuple(active)
    order = [each for each in range(count) if each not in active]
    rng.shuffle(order)
    for task in order:
        if slots.enter(JOB, task, limit, held):
            active.add(task)
        assert len(active) <= limit
    while active:
        task = rng.choice(sorted(active))
        active.discard(task)
        is_again = rng.random() < 0.3  # it failed, and is tried again
        if not is_again:
            unfinished.discard(task)
        following = slots.leave(JOB, task)
        if following is not None:
            active.add(following)
        if is_again and slots.enter(JOB, task, limit, ()):
            active.add(task)
        assert len(active) <= limit
    assert not unfinished
    assert len(slots) == 0


def test_a_task_that_is_cancelled_while_it_waits_gets_no_slot() -> None:
    slots = TaskSlots()
    assert slots.enter(JOB, 0, 1, ())
    assert [slots.enter(JOB, task, 1, ()) for task in (1, 2)] == [False, False]
    assert slots.leave(JOB, 1) is None
    assert slots.waits(JOB, 2)
    assert slots.leave(JOB, 0) == 2


def test_a_task_is_known_by_its_number_in_the_array() -> None:
    info = JobInfo(
        job_id=JobId("job"),
        name="job",
        namespace=Namespace("default"),
        status=JobStatus.PENDING,
        array=TaskArray.model_validate("10-90:10"),
    )
    assert [info.task_of(number) for number in (10, 90)] == [0, 8]
    assert [info.number_of(task) for task in (0, 8)] == [10, 90]
    with pytest.raises(ValueError, match="job job has no task 5: its array is 10-90:10"):
        info.task_of(5)
    none = info.model_copy(update={"array": None})
    assert (none.task_of(3), none.number_of(3)) == (3, 3)
