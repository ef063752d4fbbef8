"""What namespaces may have, and what they have: sums, limits, dominant shares, and what is said of them."""

from __future__ import annotations

import random

import pytest

from fluster_bus.messages import Capacity, Namespace
from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord
from fluster_services.controller.state.shares import NOTHING, Amount, Shares

A, B = Namespace("team-a"), Namespace("team-b")
GIB = 1 << 30
CPU, GPU = Capacity(cpu=1, memory=GIB), Capacity(cpu=1, memory=GIB, device="gpu", variant="h100", devices=1)


def _shares(*, weight: float = 1.0, **quota: float) -> Shares:
    """Team A has that quota, in a cluster of 10 CPUs, 100 GiB and 4 GPUs."""
    shares = Shares()
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota.model_validate(quota), weight=weight))
    shares.on_total(Amount(10_000, 100 * GIB, 4))
    return shares


def test_a_namespace_of_which_nothing_is_said_has_no_quota_and_the_weight_1() -> None:
    shares = _shares(cpus=1)
    for _ in range(1_000):
        assert shares.fits(B, CPU)
        shares.take(B, CPU)
    assert (shares.weight(B), shares.quota(B)) == (1.0, NamespaceQuota())
    assert shares.why_short(B, CPU) is None
    assert shares.why_no_more_jobs(B, 10_000) is None


@pytest.mark.parametrize(
    ("quota", "most"), [({"cpus": 3}, 3), ({"memory": 2 * GIB}, 2), ({"gpus": 1}, 1), ({"cpus": 0}, 0)]
)
def test_so_much_of_each_kind_may_be_had_and_no_more(quota: dict[str, float], most: int) -> None:
    shares = _shares(**quota)
    for _ in range(most):
        assert shares.fits(A, GPU)
        shares.take(A, GPU)
    assert not shares.fits(A, GPU)
    if most:
        shares.give_back(A, GPU)
        assert shares.fits(A, GPU)
    assert not shares.fits(A, GPU, 2)
    assert shares.could_fit(A, GPU, most)
    assert not shares.could_fit(A, GPU, most + 1)


def test_what_a_task_does_not_need_is_not_short_for_it_also_beyond_a_quota_that_was_lowered() -> None:
    shares = _shares()
    for _ in range(4):
        shares.take(A, GPU)
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(gpus=2)))
    assert shares.fits(A, CPU)
    assert not shares.fits(A, GPU)
    assert shares.fits(A, Capacity(cpu=0, memory=0))


def test_tasks_without_a_cpu_and_disk_and_counted_resources_are_held_to_no_quota() -> None:
    shares = _shares(cpus=0, memory=0, gpus=0)
    need = Capacity(disk=1 << 50, resources=(("licences", 1_000_000),))
    for _ in range(1_000):
        assert shares.fits(A, need)
        shares.take(A, need)
    assert shares.why_short(A, need) is None
    assert not shares.fits(A, CPU)


def test_fractions_of_cpus_come_out_even_whatever_comes_and_goes() -> None:
    shares, dice = _shares(cpus=1), random.Random(1)
    held: list[Capacity] = []
    for _ in range(20_000):
        if held and dice.random() < 0.5:
            shares.give_back(A, held.pop(dice.randrange(len(held))))
        else:
            held.append(Capacity(cpu=dice.choice((0.1, 0.3, 0.007)), memory=1))
            shares.take(A, held[-1])
    while held:
        shares.give_back(A, held.pop())
    assert shares.used(A) == NOTHING
    assert shares.fits(A, Capacity(cpu=0.1, memory=1), 10)
    assert not shares.fits(A, Capacity(cpu=0.1, memory=1), 11)


def test_who_waits_for_a_quota_is_told_whenever_it_may_have_more() -> None:
    shares, told = _shares(cpus=1), list[str]()
    shares.on_freed = lambda: told.append("freed")
    shares.take(A, CPU)
    assert told == []
    shares.give_back(A, CPU)
    assert len(told) == 1
    shares.on_namespace(NamespaceRecord(name=A, quota=NamespaceQuota(cpus=2)))
    assert len(told) == 2
    shares.on_namespace_gone(A)
    assert len(told) == 3
    assert shares.fits(A, CPU, 1_000)
    shares.take(B, CPU)
    shares.give_back(B, CPU)
    assert len(told) == 3, "what has no quota keeps no task waiting"


def test_the_dominant_share_is_that_of_what_it_has_most_of_for_its_weight() -> None:
    shares = _shares(weight=2)
    assert shares.weighed(A) == shares.part(A) == 0
    shares.take(A, GPU)
    assert shares.part(A) == 1 / 4, "of 4 GPUs"
    assert shares.weighed(A) == 1 / 8
    for _ in range(4):
        shares.take(B, CPU)
    assert shares.part(B) == shares.weighed(B) == 4 / 10
    shares.on_total(Amount(10_000, 0, 0))
    assert shares.part(A) == 1 / 10, "of what the cluster has none of there are no parts"
    assert Shares().part(A) == 0


def test_what_keeps_a_task_waiting_is_told_with_numbers() -> None:
    shares = _shares(cpus=8, gpus=2)
    assert shares.why_short(A, CPU) is None
    for _ in range(8):
        shares.take(A, CPU)
    assert shares.why_short(A, CPU) == "waits for the quota of namespace team-a: 8 of 8 CPUs are used"
    shares.give_back(A, CPU)
    assert shares.why_short(A, Capacity(cpu=2)) == (
        "waits for the quota of namespace team-a: 7 of 8 CPUs are used, and it needs 2"
    )
    assert shares.why_short(A, GPU, 2) == (
        "waits for the quota of namespace team-a: 7 of 8 CPUs are used, and they need 2"
    )
    assert _shares(memory=4 * GIB).why_short(A, CPU, 4) is None
    shares = _shares(memory=4 * GIB)
    for _ in range(3):
        shares.take(A, CPU)
    assert shares.why_short(A, CPU, 2) == (
        "waits for the quota of namespace team-a: 3 GiB of 4 GiB memory are used, and they need 2 GiB"
    )


def test_what_never_fits_is_told_with_the_quota_and_the_remedy() -> None:
    shares = _shares(cpus=8, gpus=2)
    assert shares.why_never(A, CPU, 8) is None
    assert shares.why_never(A, Capacity(cpu=16)) == (
        "it needs 16 CPUs, more than the quota of namespace team-a ever has room for (8 CPUs): ask for less, or have an "
        "operator raise it (`fluster namespace set team-a --cpus 16`)"
    )
    assert shares.why_never(A, GPU, 9) == (
        "its 9 tasks need 9 CPUs and 9 GPUs together, more than the quota of namespace team-a ever has room for (8 CPUs and "
        "2 GPUs): ask for less, or have an operator raise it (`fluster namespace set team-a --cpus 9 --gpus 9`)"
    )
    assert shares.why_short(A, Capacity(cpu=16)) == shares.why_never(A, Capacity(cpu=16))


def test_jobs_that_wait_are_bounded_by_number() -> None:
    shares = _shares(waiting_jobs=2)
    assert shares.why_no_more_jobs(A, 1) is None
    assert shares.why_no_more_jobs(A, 2) == (
        "2 jobs of namespace team-a wait, as many as its quota allows (2): submit it again when some of them have started, or "
        "have an operator raise it (`fluster namespace set team-a --waiting-jobs N`)"
    )
