"""Machines with GPUs of several models: each is offered, and no GPU is given twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core.devices import Devices
from fluster_bus.messages import Capacity, Namespace, ResourceConfig
from fluster_services.capacity import (
    class_of,
    classes_covered,
    describe,
    device_count,
    fits,
    minus,
    misfit,
    models,
    needed,
    plus,
    plus_all,
    times_fit,
)
from fluster_services.worker.attempts.ledger import Ledger

GIB = 1 << 30
NS = Namespace("default")
TOTAL = Capacity(
    cpu=64,
    memory=512 * GIB,
    device="gpu",
    variant="h100",
    devices=4,
    other_devices=(("a100", 2), ("t4", 1)),
    namespaces=(NS,),
)
IDS = ("0", "1", "4", "5")
OTHERS = (Devices("gpu", "a100", ("2", "3")), Devices("gpu", "t4", ("6",)))
MODEL_OF = {**dict.fromkeys(IDS, "h100"), "2": "a100", "3": "a100", "6": "t4"}


def need(variant: str, count: int) -> Capacity:
    return needed(ResourceConfig.with_gpu(variant, count), NS)


@pytest.mark.parametrize(
    ("variant", "count", "times"),
    [
        ("h100", 4, 1),
        ("h100", 5, 0),
        ("a100", 1, 2),
        ("a100", 2, 1),
        ("t4", 1, 1),
        ("t4", 2, 0),
        ("v100", 1, 0),
        ("any", 1, 7),
        ("any", 2, 3),  # two of the h100, one of the a100: a task has devices of one model
        ("any", 4, 1),
        ("any", 5, 0),
    ],
)
def test_each_model_is_offered(variant: str, count: int, times: int) -> None:
    wanted = need(variant, count)
    assert fits(wanted, TOTAL) is (times > 0)
    assert times_fit(wanted, TOTAL, 100) == times
    offered = class_of(wanted)
    assert (offered in classes_covered(TOTAL)) is (times > 0 and count in {1, 2, 4})


def test_any_takes_of_the_model_of_which_fewest_are_left() -> None:
    ledger = Ledger(TOTAL, IDS, OTHERS)
    given_ids: list[str] = []
    for number in range(7):
        assert ledger.reserve(str(number), need("any", 1))
        given_ids += ledger.devices(str(number))
    assert given_ids == ["6", "2", "3", "0", "1", "4", "5"]
    assert not ledger.reserve("one more", need("any", 1))
    assert device_count(ledger.free) == 0


def test_a_worker_of_one_model_is_as_before() -> None:
    single = Capacity(cpu=8, memory=8 * GIB, device="gpu", variant="h100", devices=4)
    left = minus(single, need("any", 3))
    assert (left.devices, left.other_devices) == (1, ())
    assert b"other_devices" not in left.to_json()
    assert Capacity.from_json(TOTAL.to_json()) == TOTAL


def test_what_is_missing_names_all_models() -> None:
    said = misfit(need("v100", 1), [("w1", TOTAL)])
    assert said.endswith("no worker has 1 x gpu v100; there is 4 x gpu h100 + 2 x gpu a100 + 1 x gpu t4")
    assert "4 x gpu h100 + 2 x gpu a100" in describe(TOTAL)


NEEDS = st.tuples(st.sampled_from(["any", "h100", "a100", "t4"]), st.integers(1, 4))


@given(st.lists(st.one_of(NEEDS, st.integers(0, 9)), max_size=40))
def test_no_history_of_the_ledger_gives_a_device_twice(history: list[tuple[str, int] | int]) -> None:
    ledger = Ledger(TOTAL, IDS, OTHERS)
    held: list[str] = []
    for number, step in enumerate(history):
        if isinstance(step, int):
            if step < len(held):
                assert ledger.release(held.pop(step))
        else:
            wanted = need(*step)
            could = fits(wanted, ledger.free)
            assert ledger.reserve(str(number), wanted) is could
            if could:
                held.append(str(number))
                ids = ledger.devices(str(number))
                assert len(ids) == step[1]
                assert len({MODEL_OF[each] for each in ids}) == 1
                assert step[0] in {"any", MODEL_OF[ids[0]]}
        taken = [each for attempt in held for each in ledger.devices(attempt)]
        assert len(set(taken)) == len(taken)
        free = {model: sum(MODEL_OF[each] == model for each in MODEL_OF.keys() - taken) for model in models(TOTAL)}
        assert models(ledger.free) == free
    for attempt in held:
        ledger.release(attempt)
    assert ledger.free == TOTAL


@given(st.lists(NEEDS, max_size=20))
def test_what_is_taken_adds_up_in_any_order(taken: list[tuple[str, int]]) -> None:
    nothing = Capacity(tasks=0)
    needs = [need(*each) for each in taken]
    added = plus_all(nothing, needs)
    assert added == plus_all(nothing, reversed(needs))
    assert device_count(added) == sum(count for _, count in taken)
    for each in needs:
        added = minus(added, each)
    assert added == nothing
    left = minus(TOTAL, plus_all(nothing, needs))
    assert device_count(left) == 7 - sum(count for _, count in taken)


def test_adopted_attempts_keep_their_devices_when_these_are_found() -> None:
    ledger = Ledger(TOTAL.model_copy(update={"device": "cpu", "variant": "none", "devices": 0, "other_devices": ()}))
    ledger.hold("adopted", need("any", 1), ["3"])
    assert device_count(ledger.free) == 0
    ledger.add_devices(Devices("gpu", "h100", IDS, OTHERS))
    assert ledger.total == TOTAL
    assert models(ledger.free) == {"h100": 4, "a100": 1, "t4": 1}
    assert ledger.reserve("next", need("a100", 1))
    assert ledger.devices("next") == ("2",)
    assert ledger.release("adopted")
    assert models(ledger.free) == {"h100": 4, "a100": 1, "t4": 1}


def test_workers_of_a_machine_share_each_model() -> None:
    devices = Devices("gpu", "h100", IDS, OTHERS)
    assert devices.share(0, 2) == Devices("gpu", "h100", ("0", "1"), (Devices("gpu", "a100", ("2",)),))
    assert devices.share(1, 2) == Devices(
        "gpu", "h100", ("4", "5"), (Devices("gpu", "a100", ("3",)), Devices("gpu", "t4", ("6",)))
    )
    assert plus(minus(TOTAL, need("t4", 1)), need("t4", 1)) == TOTAL
