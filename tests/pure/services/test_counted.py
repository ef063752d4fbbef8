"""What is counted by names of the users' own, such as licences: who may ask for what, who has it, what is said."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.messages import Capacity, Namespace, ResourceConfig, TaskRecord
from fluster_bus.messages.parts.counted import as_counts, number_text, parse_counts, share
from fluster_bus.messages.parts.resources import GIB
from fluster_services.capacity import class_of, classes_covered, describe, fits, minus, misfit, needed, plus

NS = Namespace("default")
NEED = needed(ResourceConfig.with_cpu(1, resources={"license": 1}), NS)
HAS = Capacity(cpu=4, memory=8 * GIB, resources=(("license", 2.0), ("slot", 0.5)), namespaces=(NS,))
NONE = Capacity(cpu=4, memory=8 * GIB, namespaces=(NS,))


def test_a_task_fits_where_as_much_is_left() -> None:
    assert [fits(NEED, worker) for worker in (HAS, NONE)] == [True, False]
    assert fits(needed(ResourceConfig()), HAS)
    both = needed(ResourceConfig(resources={"license": 2, "slot": 0.5}))
    assert fits(both, HAS)
    assert not fits(both, minus(HAS, NEED))


def test_a_worker_that_does_not_know_them_is_never_asked() -> None:
    """It listens on classes, so these tasks are in none; by name it is asked only for what it said it has."""
    assert class_of(NEED) is None
    assert classes_covered(HAS) == classes_covered(NONE) != frozenset()
    assert Capacity.from_json(b'{"cpu": 4, "memory": 1}').resources == ()


def test_what_is_given_away_comes_back() -> None:
    left = minus(minus(HAS, NEED), NEED)
    assert left.resources == (("slot", 0.5),)
    assert minus(NONE, NEED).resources == (("license", -1.0),)
    assert plus(minus(NONE, NEED), NEED) == NONE
    assert plus(plus(left, NEED), NEED) == HAS


def test_what_no_worker_has_is_told() -> None:
    assert describe(NEED) == "1 CPU, 1 GiB memory, license: 1"
    told = misfit(NEED, [("w1", NONE)])
    assert told == "needs 1 CPU, 1 GiB memory, license: 1; no worker has license: 1 (the most any has is 0)"
    three = needed(ResourceConfig(resources={"license": 3}))
    assert misfit(three, [("w1", NONE), ("w2", HAS)]).endswith("no worker has license: 3 (the most any has is 2)")


def test_on_the_wire_it_is_what_people_write() -> None:
    assert b'"resources":{"license":2.0,"slot":0.5}' in HAS.to_json()
    assert Capacity.from_json(HAS.to_json()) == HAS
    asked = ResourceConfig(resources={"license": 0.3})
    assert ResourceConfig.from_json(asked.to_json()) == asked
    assert b"resources" not in ResourceConfig().to_json()


@pytest.mark.parametrize("count", ["0", "-1", "NaN", '"1"', "true", "1e12", "0.00001", "null"])
def test_what_a_tenant_writes_is_checked(count: str) -> None:
    for kind in (ResourceConfig, Capacity):
        with pytest.raises(InvalidMessageError, match="license"):
            kind.from_json(f'{{"resources": {{"license": {count}}}}}'.encode())
    with pytest.raises(InvalidMessageError):
        TaskRecord.from_json(f'{{"resources": {{"resources": {{"license": {count}}}}}}}'.encode())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"license": 0}, "invalid count 0 of license: expected a number above 0"),
        ({"license": -2}, "invalid count -2 of license"),
        ({"license": math.nan}, "invalid count nan of license"),
        ({"license": math.inf}, "invalid count inf of license"),
        ({"license": True}, "invalid count True of license"),
        ({"license": "1"}, "invalid count '1' of license"),
        ({"license": 2e9}, r"invalid count 2000000000.0 of license: .* up to 1e\+09"),
        ({"license": 1 / 3}, "invalid count 0.333.* of license: give at most 4 decimals, such as 0.3333"),
        ({"a license": 1}, "invalid resource name 'a license': use at most 64 letters"),
        ({"": 1}, "invalid resource name ''"),
        ({"x" * 65: 1}, "invalid resource name"),
        ({3: 1}, "invalid resource name 3"),
        ({"GPU": 1}, "'GPU' cannot be counted by a name of its own: give it as device"),
        ({"memory": 1}, "'memory' cannot be counted by a name of its own: give it as memory"),
        ({str(number): 1 for number in range(33)}, "33 resources are too many: give at most 32"),
        (["license"], r"invalid resources \['license'\]: expected \{name: count\}"),
    ],
)
def test_what_cannot_be_counted_is_refused_where_it_is_asked_for(given: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ResourceConfig(resources=given)  # type: ignore[arg-type]


def test_counts_are_read_from_text() -> None:
    assert parse_counts(" license=4, slot=0.5,") == {"license": 4.0, "slot": 0.5}
    assert parse_counts("") == {}
    assert ResourceConfig(resources={"slot": 0.1 + 0.2}).resources == {"slot": 0.3}


@pytest.mark.parametrize(
    "text", ["license", "license=", "license=x", "=license=1", "license=0", "license=1e3", "a=1,a=2"]
)
def test_text_that_is_no_count_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match=r"license|a is given twice"):
        parse_counts(text)


@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 99_999).map(lambda each: each / 1000)), st.integers(1, 7))
def test_parts_are_whole_pieces_and_all_there_is(given: dict[str, float], parts: int) -> None:
    counts = as_counts(given)
    shares = [dict(share(counts, number, parts)) for number in range(parts)]
    for name, count in counts:
        pieces = [each.get(name, 0) for each in shares]
        assert round(sum(pieces), 4) == count
        assert all(float(piece).is_integer() for piece in pieces[:-1] if piece)
        assert max(pieces) - min(pieces) < 2


def test_numbers_for_people() -> None:
    assert [number_text(each) for each in (0, 1, 10, 0.5, 1_000_000_000, 0.0001)] == [
        "0",
        "1",
        "10",
        "0.5",
        "1000000000",
        "0.0001",
    ]
