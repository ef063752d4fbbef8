"""The table that holds Fluster against its peers."""

from benchmarks.actor_work import Figures
from benchmarks.side_by_side import WORKS, medians, rows


def _alike(value: float, **others: float) -> Figures:
    return {**{work.key: value for work in WORKS}, **others}


def test_the_median_of_each_figure_counts_wherever_it_was_taken() -> None:
    assert medians([{"first_reply_s": 1.0}, {"first_reply_s": 9.0, "call_s": 4.0}, {"first_reply_s": 2.0}]) == {
        "first_reply_s": 2.0,
        "call_s": 4.0,
    }


def test_each_work_is_held_against_each_peer_that_has_done_it() -> None:
    found = list(rows({"Fluster": _alike(3.0, bare_s=1.5), "xoscar": _alike(2.0), "Ray": {"tasks": 6.0}}))
    calls, tasks = found[:2], next(index for index, row in enumerate(found) if "tasks" in row.what)
    assert [(row.against.partition(" ")[0], row.ratio, row.target) for row in calls] == [
        ("nc.request", 2.0, "≤ 0.8"),
        ("xoscar", 1.5, "≤ 1"),
    ]
    assert [(row.what != "", row.against, row.ratio) for row in found[tasks : tasks + 2]] == [
        (True, "xoscar 2/s", 1.5),
        (False, "Ray 6/s", 0.5),
    ]


def test_a_map_is_held_against_the_one_way_in_which_peers_run_tasks() -> None:
    found = list(rows({"Fluster": _alike(24.0), "xoscar": {"tasks": 2.0}}))
    assert [(row.against, row.ratio, row.target) for row in found if "map" in row.what] == [
        ("xoscar 2/s", 12.0, "≥ 12")
    ]


def test_without_peers_the_figures_stand_alone() -> None:
    found = list(rows({"Fluster": _alike(0.25)}))
    assert [row.what for row in found] == [work.what for work in WORKS]
    assert {row.ratio for row in found} == {None}
    assert [row.value for row in found if row.target == "≤ 0.35 s"] == ["0.25 s"]
