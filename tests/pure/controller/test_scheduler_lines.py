"""Which lines open and close, and who counts as overtaken, where one wrong comparison would go unseen for long."""

from fluster_bus.messages import Capacity, JobId, Namespace
from fluster_services.controller.scheduling.order import Position, Starving
from fluster_services.controller.scheduling.scheduler import Scheduler
from fluster_services.controller.state.job_index import JobKey

SMALL, LARGE = Capacity(cpu=1, memory=1), Capacity(cpu=4, memory=1)


def _position(order: int, job: str | None = None) -> Position:
    return Position(order, 0, JobKey(Namespace("default"), JobId(job or f"job{order}")))


def _taken(scheduler: Scheduler, limit: int = 99) -> list[Position]:
    return [position for position, _ in scheduler.take(limit)]


def _close(scheduler: Scheduler, *needs: tuple[Position, Capacity]) -> None:
    """Have these wait, and no worker have room for them."""
    for position, need in needs:
        scheduler.add(position, need)
    for position, need in reversed(scheduler.take(99)):
        scheduler.on_declined(position, need, room=False)


def _starving(scheduler: Scheduler, now: float) -> list[Position]:
    return [each.position for each in scheduler.starving(now=now, reserve_after_s=10)]


# ---- room that comes ------------------------------------------------------------------------------------


def test_a_worker_that_says_what_it_has_left_opens_the_lines_that_fit_and_no_others() -> None:
    scheduler = Scheduler()
    small, large = _position(1), _position(0)
    _close(scheduler, (large, LARGE), (small, SMALL))
    assert _taken(scheduler) == []
    scheduler.on_room(Capacity(cpu=2, memory=9))
    assert _taken(scheduler) == [small]
    scheduler.on_room(Capacity(cpu=4, memory=9))
    assert _taken(scheduler) == [large]


def test_room_that_is_said_without_a_size_opens_all_lines() -> None:
    scheduler = Scheduler()
    _close(scheduler, (_position(0), LARGE), (_position(1), SMALL))
    scheduler.on_room()
    assert _taken(scheduler) == [_position(0), _position(1)]


def test_an_answer_that_found_room_opens_its_line_unless_workers_were_kept_from_it() -> None:
    for reserved, expected in (False, [5]), (True, []):
        scheduler = Scheduler()
        for order in (5, 6):
            scheduler.add(_position(order), SMALL)
        assert _taken(scheduler) == [_position(5), _position(6)]
        if reserved:
            scheduler.add(_position(1), LARGE)
            scheduler.reserve(Starving(_position(1), LARGE))
            assert _taken(scheduler) == [_position(1)]
        scheduler.on_declined(_position(6), SMALL, room=False)
        scheduler.on_declined(_position(5), SMALL, room=True)  # another reason than room, where it was offered
        assert [position.order for position in _taken(scheduler)] == expected


# ---- who is overtaken -----------------------------------------------------------------------------------


def test_tasks_of_one_need_do_not_overtake_each_other() -> None:
    scheduler = Scheduler()
    for order in range(3):
        scheduler.add(_position(order), SMALL, now=0)
    first, second = _taken(scheduler, 2)
    for position in (second, first):  # answers come in any order
        scheduler.on_accepted(SMALL, position, now=0)
        scheduler.remove(position.job, position.task)
    assert _starving(scheduler, 1_000) == []


def test_what_stands_behind_a_task_is_not_overtaken_by_it() -> None:
    scheduler = Scheduler()
    _close(scheduler, (_position(0), LARGE), (_position(8), LARGE))
    scheduler.remove(_position(0).job, 0)
    scheduler.add(_position(9), Capacity(cpu=2, memory=1))  # it was not offered yet
    scheduler.add_gang(_position(7, "gang"), SMALL, 2)
    scheduler.on_accepted(SMALL, _position(5), now=0)
    assert _starving(scheduler, 1_000) == []
    scheduler.on_accepted(SMALL, _position(8, "another"), now=100)
    scheduler.remove(_position(8).job, 0)
    scheduler.on_accepted(SMALL, _position(8, "another"), now=100)  # also where none is left in a line
    assert _starving(scheduler, 109) == []
    assert _starving(scheduler, 110) == [_position(7, "gang")]


def test_a_gang_is_not_overtaken_while_all_its_tasks_are_claimed() -> None:
    """What passes it then takes nothing that it needs; once it was let go, it is overtaken by the next that does."""
    scheduler = Scheduler()
    gang = _position(1, "gang")
    scheduler.add_gang(gang, SMALL, 4)
    scheduler.on_gathered(gang.job, now=0)
    scheduler.on_accepted(SMALL, _position(8), now=5)
    scheduler.add_gang(gang, SMALL, 4)
    assert _starving(scheduler, 1_000) == []
    scheduler.on_accepted(SMALL, _position(9), now=20)
    assert _starving(scheduler, 29.9) == []
    assert _starving(scheduler, 30) == [gang]


# ---- gangs ----------------------------------------------------------------------------------------------


def test_a_job_in_the_place_of_another_waits_as_the_gang_that_it_is() -> None:
    scheduler = Scheduler()
    before, after = _position(1, "gang"), _position(7, "gang")
    scheduler.add_gang(before, SMALL, 2)
    scheduler.add_gang(after, LARGE, 4)
    scheduler.on_accepted(SMALL, _position(5), now=0)
    assert _starving(scheduler, 1_000) == [], "it was submitted later than what was placed"
    scheduler.on_accepted(SMALL, _position(9), now=0)
    assert [*scheduler.starving(now=10, reserve_after_s=10)] == [Starving(after, LARGE, 4)]


def test_a_reservation_ends_with_its_own_gang_and_no_other() -> None:
    scheduler = Scheduler()
    reserved, other = _position(1, "reserved"), _position(2, "other")
    for gang in (reserved, other):
        scheduler.add_gang(gang, SMALL, 4)
    scheduler.reserve(Starving(reserved, SMALL, 4))
    scheduler.remove_gang(other.job)
    assert scheduler.reserved == reserved
    scheduler.remove_gang(reserved.job)
    assert scheduler.reserved is None


def test_what_was_kept_from_workers_is_offered_again_when_others_are_kept_free_and_not_before() -> None:
    scheduler = Scheduler()
    _close(scheduler, (_position(9), SMALL))
    second, first = _position(5, "second"), _position(1, "first")
    for gang in (second, first):
        scheduler.add_gang(gang, SMALL, 4)
    scheduler.reserve(Starving(second, SMALL, 4))
    assert _taken(scheduler) == [], "it has found no room, and has no more now"
    scheduler.reserve(Starving(first, SMALL, 4))
    assert _taken(scheduler) == [_position(9)]


def test_it_is_said_whether_a_gang_waited() -> None:
    scheduler = Scheduler()
    gang = _position(1, "gang")
    scheduler.add_gang(gang, SMALL, 2)
    assert scheduler.remove_gang(gang.job)
    assert not scheduler.remove_gang(gang.job)
