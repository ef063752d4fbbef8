"""Which workers are kept free: those from which the least has to come back, by every kind of thing that a task may need."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.messages import Capacity
from fluster_services import capacity
from fluster_services.controller.scheduling.order import reserved_workers
from fluster_services.controller.state.worker_index import WorkerView

KINDS = ("cpu", "memory", "disk", "devices", "tasks", "licence")


Amounts = Mapping[str, int | None]


def _of(amounts: Amounts) -> Capacity:
    given = dict(amounts)
    licences = given.pop("licence")
    counts = (("licence", licences),) if licences else ()  # what is not named is not there
    fields = {kind: amount for kind, amount in given.items() if amount is not None}
    return Capacity.model_validate({"device": "gpu", "variant": "a", "resources": counts, **fields})


_totals = st.fixed_dictionaries(
    {kind: st.integers(2, 8) for kind in KINDS}
    | {"disk": st.integers(0, 8), "tasks": st.none() | st.integers(1, 8), "licence": st.integers(0, 4)}
)
_needs = st.fixed_dictionaries(
    {kind: st.integers(0, 3) for kind in KINDS} | {"tasks": st.just(1), "licence": st.integers(0, 2)}
)


@st.composite
def _workers(draw: st.DrawFn) -> list[tuple[Amounts, Amounts]]:
    """What each has in all, and free."""
    totals = draw(st.lists(_totals, min_size=1, max_size=4))
    return [
        (total, {kind: None if amount is None else draw(st.integers(0, amount)) for kind, amount in total.items()})
        for total in totals
    ]


def _missing(need: Amounts, total: Amounts, free: Amounts) -> float:
    """The part of what the worker has that has to come back before the need fits, of the scarcest kind."""
    parts = []
    for kind in KINDS:
        wanted, of, left = need[kind], total[kind], free[kind]
        if wanted and of and left is not None:
            parts.append((wanted - left) / of)
    return max(parts, default=0.0)


@given(_needs, st.integers(1, 6), _workers())
def test_those_that_lack_least_are_chosen_one_task_after_the_other(
    need: Amounts,
    count: int,
    workers: list[tuple[Amounts, Amounts]],
) -> None:
    views = [WorkerView(f"w{number}", _of(total), _of(free)) for number, (total, free) in enumerate(workers)]
    taken = dict.fromkeys(range(len(workers)), 0)

    def in_use(number: int, amounts: Amounts) -> Amounts:
        """What is left of `amounts` beside the tasks for which the worker was chosen already."""
        return {
            kind: None if amount is None else amount - taken[number] * (need[kind] or 0)
            for kind, amount in amounts.items()
        }

    def could_hold_more(number: int) -> bool:
        total = in_use(number, workers[number][0])
        return all(
            (total[kind] or 0) >= (need[kind] or 0) or (kind == "tasks" and total[kind] is None) for kind in KINDS
        )

    for _ in range(count):
        able = [number for number in taken if could_hold_more(number)]
        if not able:
            assert reserved_workers(_of(need), count, views) == (), "all together could not"
            return
        lacking = {
            number: (_missing(need, workers[number][0], in_use(number, workers[number][1])), number) for number in able
        }
        taken[min(able, key=lacking.__getitem__)] += 1
    assert reserved_workers(_of(need), count, views) == tuple(f"w{number}" for number, tasks in taken.items() if tasks)


def _lacks(kind: str, name: str, free: int, of: int = 8) -> WorkerView:
    full: Amounts = dict.fromkeys(KINDS, of)
    return WorkerView(name, _of(full), _of({**full, kind: free}))


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_may_be_the_scarcest(kind: str) -> None:
    need = _of({**dict.fromkeys(KINDS, 1), kind: 1 if kind == "tasks" else 4})
    assert capacity.fits(need, _lacks(kind, "w", 8).free)
    assert reserved_workers(need, 1, [_lacks(kind, "w1", 0), _lacks(kind, "w2", 1)]) == ("w2",)
    assert reserved_workers(need, 1, [_lacks(kind, "w1", 0, of=4), _lacks(kind, "w2", 0)]) == ("w2",), (
        "of more, it is a smaller part"
    )


def test_what_the_task_does_not_need_is_not_looked_at() -> None:
    need = _of({**dict.fromkeys(KINDS, 0), "cpu": 1, "tasks": 1})
    assert reserved_workers(need, 1, [_lacks("cpu", "w1", 1), _lacks("memory", "w2", 0)]) == ("w2",)
