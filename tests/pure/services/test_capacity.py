"""Capacity classes: an offer reaches the workers that have room, and no others."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.messages import Capacity, Namespace, ResourceConfig
from fluster_bus.messages.parts.resources import GIB, KIB, MIB, TIB
from fluster_services import capacity
from fluster_services.capacity import CapacityClass, class_of, classes_covered, fits, minus, needed, plus, times_fit

A, B = Namespace("a"), Namespace("b")
CPU_LEVELS = [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 64.0, 4096.0]
MEMORY_LEVELS = [128 * MIB, 256 * MIB, GIB, 4 * GIB, TIB, 4 * TIB]
DEVICES = [("cpu", "none", 0), ("gpu", "h100", 8), ("gpu", "h100", 3), ("gpu", "any", 1), ("tpu", "v5litepod-8", 8)]

cpus = st.sampled_from(CPU_LEVELS) | st.integers(0, 5_000_000).map(lambda milli: milli / 1000)
memories = st.sampled_from(MEMORY_LEVELS) | st.integers(0, 5 * TIB)


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    device, variant, devices = draw(st.sampled_from(DEVICES))
    return Capacity(
        cpu=draw(cpus),
        memory=draw(memories),
        device=device,
        variant=variant,
        devices=devices,
        namespaces=draw(st.sampled_from([(A,), (B,), (A, B)])),
    )


@st.composite
def needs_on_levels(draw: st.DrawFn) -> Capacity:
    device, variant, devices = draw(
        st.sampled_from([each for each in DEVICES if each[2] in (0, 1, 8)] + [("gpu", "a100", 64)])
    )
    return Capacity(
        cpu=draw(st.sampled_from(CPU_LEVELS)),
        memory=draw(st.sampled_from(MEMORY_LEVELS)),
        device=device,
        variant=variant,
        devices=devices,
        namespaces=(A,),
    )


def _as_need(offered: CapacityClass) -> Capacity:
    return Capacity(
        cpu=offered.cpu,
        memory=offered.memory,
        device=offered.device,
        variant=offered.variant,
        devices=offered.devices,
        namespaces=(offered.namespace,),
    )


@given(needs_on_levels(), capacities())
def test_a_worker_listens_exactly_where_a_need_on_the_levels_fits(need: Capacity, free: Capacity) -> None:
    offered = class_of(need)
    assert offered is not None
    assert not capacity.is_between_levels(need, offered)
    assert (offered in classes_covered(free)) == fits(need, free)


@given(capacities())
def test_a_worker_listens_to_no_class_that_does_not_fit(free: Capacity) -> None:
    for offered in classes_covered(free):
        assert fits(_as_need(offered), free)


@given(capacities(), capacities())
def test_whoever_covers_the_class_above_a_need_has_room_for_it(need: Capacity, free: Capacity) -> None:
    offered = class_of(need)
    if offered is not None and offered in classes_covered(free):
        assert fits(need, free)


@given(capacities())
def test_the_class_of_a_need_covers_it_and_no_smaller_one_does(need: Capacity) -> None:
    offered = class_of(need)
    if offered is None:
        assert need.cpu > 4096 or need.memory > 4 * TIB or need.namespaces == (A, B)
        return
    assert fits(need.model_copy(update={"device": offered.device, "variant": offered.variant}), _as_need(offered))
    smaller = [each for each in classes_covered(_as_need(offered)) if fits(need, _as_need(each))]
    assert smaller in ([offered], [])  # none when the class's variant is `any`, which no worker is


def test_classes_of_different_sizes_have_different_subjects() -> None:
    free = Capacity(cpu=4096, memory=8 * TIB, device="gpu", variant="h100", devices=64, namespaces=(A, B))
    covered = classes_covered(free)
    assert len({each.subject for each in covered}) == len(covered)
    assert class_of(_of_a(cpu=0.25)).subject == "fluster.a.dispatch.cpu.none.0.c250m.m1024"  # type: ignore[union-attr]


def _of_a(**fields: Any) -> Capacity:
    return Capacity(**{"cpu": 1, "memory": GIB, "namespaces": (A,), **fields})


def test_a_task_is_offered_to_workers_of_its_namespace() -> None:
    need = needed(ResourceConfig.with_cpu(1, memory=GIB), A)
    for namespaces, fitting in (((A,), True), ((A, B), True), ((B,), False)):
        free = _of_a(namespaces=namespaces)
        assert fits(need, free) is fitting
        assert (class_of(need) in classes_covered(free)) is fitting
    assert fits(need, Capacity(cpu=1, memory=GIB)), "it does not say, as none did before"
    why = capacity.misfit(need, [("w1", _of_a(namespaces=(B,)))])
    assert why.startswith(
        "no worker runs jobs of namespace a (those that there are run jobs of b): one needs credentials"
    )
    assert "`fluster credentials add worker NAME --namespace a`" in why


def test_disk_is_in_no_class() -> None:
    assert class_of(_of_a(disk=1)) is None


def test_gpus_of_no_model_are_for_tasks_that_name_none() -> None:
    free = _of_a(cpu=8, device="gpu", variant="any", devices=2)
    for variant, fitting in (("any", True), ("h100", False)):
        need = needed(ResourceConfig.with_gpu(variant, 2, cpu=1, memory=GIB), A)
        assert fits(need, free) is fitting
        assert (class_of(need) in classes_covered(free)) is fitting


def test_what_is_counted_by_other_names_is_in_no_class() -> None:
    assert class_of(_of_a(resources=(("license", 1.0),))) is None


def test_devices_fit_by_model_and_number() -> None:
    free = Capacity(cpu=8, memory=GIB, device="gpu", variant="h100", devices=4)
    for variant, devices, fitting in (("h100", 4, True), ("any", 4, True), ("h100", 5, False), ("a100", 1, False)):
        need = Capacity(cpu=1, memory=GIB, device="gpu", variant=variant, devices=devices)
        assert fits(need, free) is fitting
    assert not fits(Capacity(device="tpu", variant="v6e-4", devices=4), free)
    assert fits(Capacity(cpu=8, memory=GIB), free)


@given(st.lists(st.floats(0, 64, allow_nan=False), max_size=20), st.randoms(use_true_random=False))
def test_what_is_given_away_comes_back_whole(wanted: list[float], random: object) -> None:
    """In any order, and however odd the fractions: else a worker would lose its largest class bit by bit."""
    total = Capacity(cpu=10_000, memory=TIB, disk=TIB)
    needs = [needed(ResourceConfig.with_cpu(cpu, memory=7, disk=3)) for cpu in wanted]
    free = total
    for need in needs:
        free = minus(free, need)
        assert Fraction(free.cpu).limit_denominator(10_000).denominator in {
            1,
            2,
            4,
            5,
            8,
            10,
            20,
            25,
            40,
            50,
            100,
            125,
            200,
            250,
            500,
            1000,
        }
    random.shuffle(needs)  # type: ignore[attr-defined]
    for need in needs:
        free = plus(free, need)
    assert free == total


@pytest.mark.parametrize("first", [0.0005, 0.1235, 0.2345, 1 / 3, 1 / 7])
@pytest.mark.parametrize("second", [0.0005, 0.0015, 0.0025])
def test_odd_fractions_leave_no_crumbs(first: float, second: float) -> None:
    total = Capacity(cpu=1, memory=4 * GIB)
    one, two = needed(ResourceConfig.with_cpu(first)), needed(ResourceConfig.with_cpu(second))
    assert plus(plus(minus(minus(total, one), two), one), two) == total


@given(st.floats(0, 4096, allow_nan=False))
def test_a_fraction_of_a_cpu_is_never_less_than_was_asked(cpu: float) -> None:
    need = needed(ResourceConfig.with_cpu(cpu))
    assert cpu - 1e-6 <= need.cpu <= cpu + 0.001


def test_seven_sevenths_fit_into_what_is_said_to_be_free() -> None:
    assert needed(ResourceConfig.with_cpu(0.1)).cpu == 0.1
    assert needed(ResourceConfig.with_cpu(0.3)).cpu == 0.3
    free = Capacity(cpu=1, memory=10 * GIB)
    for _ in range(10):
        assert fits(needed(ResourceConfig.with_cpu(0.1)), free)
        free = minus(free, needed(ResourceConfig.with_cpu(0.1)))
    assert free.cpu == 0


def test_what_a_task_takes() -> None:
    assert needed(ResourceConfig.with_tpu("v5litepod-16")).devices == 4
    gpu = needed(ResourceConfig.with_gpu("H100", 2, cpu=3, memory="2GiB"))
    assert (gpu.device, gpu.variant, gpu.devices, gpu.cpu, gpu.memory) == ("gpu", "h100", 2, 3, 2 * GIB)
    assert needed(ResourceConfig()).devices == 0


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (MIB, "1 MiB"),
        (GIB, "1 GiB"),
        (TIB, "1 TiB"),
        (5000 * TIB, "5000 TiB"),
        (3 * GIB // 2, "1.5 GiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert capacity.describe_bytes(size) == text


def test_a_misfit_is_explained() -> None:
    need = Capacity(cpu=100, memory=GIB, device="gpu", variant="h100", devices=8)
    text = capacity.misfit(need, [("small", Capacity(cpu=1)), ("large", Capacity(cpu=4, memory=8 * GIB))])
    assert text == "needs 100 CPUs, 1 GiB memory, 8 x gpu h100; no worker has 8 x gpu h100; none has any"


SMALL = st.builds(
    Capacity,
    cpu=st.integers(0, 4000).map(lambda n: n / 1000),
    memory=st.integers(0, 5),
    disk=st.integers(0, 3),
    tasks=st.none() | st.integers(0, 9),
    resources=st.integers(0, 3).map(lambda n: (("license", n / 2),) if n else ()),
)


@given(
    st.floats(0, 2).filter(lambda cpu: cpu == 0 or cpu > 0.05),
    st.integers(0, 2),
    st.integers(0, 2),
    SMALL,
    st.booleans(),
)
def test_how_often_a_task_fits_is_how_often_it_can_be_taken_away(
    cpu: float, memory: int, disk: int, free: Capacity, counted: bool
) -> None:
    counts = {"license": 0.5} if counted else {}
    need = needed(ResourceConfig(cpu=cpu, disk=disk, resources=counts)).model_copy(update={"memory": memory})
    left, most = free, 50
    count = 0
    while count < most and fits(need, left):
        left, count = minus(left, need), count + 1
    assert times_fit(need, free, most) == count


def test_a_task_that_asks_for_no_memory_takes_some() -> None:
    """Ten thousand of them would else be begun at one worker, where those of other namespaces run."""
    assert needed(ResourceConfig(cpu=0, memory=0)).memory == 128 * MIB
    assert needed(ResourceConfig(cpu=0, memory=1)).memory == 16 * MIB
    assert needed(ResourceConfig(cpu=0, memory=GIB)).memory == GIB
