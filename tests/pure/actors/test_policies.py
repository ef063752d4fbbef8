from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import ByKey, LeastOutstanding, Random, RoundRobin, policy_of
from fluster_bus.messages import EndpointId

names = st.lists(st.text("abcdef0123456789", min_size=1, max_size=20), min_size=1, max_size=12, unique=True)
keys = st.recursive(st.text() | st.binary() | st.integers() | st.booleans(), lambda inner: st.tuples(inner, inner))


def members_of(names: list[str]) -> list[Member]:
    return [Member(EndpointId(name), "pool", f"to.{name}") for name in names]


@given(names, st.integers(1, 5))
def test_round_robin_gives_each_the_same(names: list[str], rounds: int) -> None:
    policy, members = RoundRobin(), members_of(names)
    given = [policy.choose(members, {}) for _ in range(rounds * len(members))]
    assert given == members * rounds


@given(names, st.data())
def test_least_outstanding_chooses_none_that_has_more_than_another(names: list[str], data: st.DataObject) -> None:
    members = members_of(names)
    out = {name: data.draw(st.integers(0, 5)) for name in names}
    chosen = LeastOutstanding().choose(members, out)
    assert out[chosen.endpoint_id] == min(out.values())


@given(names)
def test_least_outstanding_takes_turns_among_equals(names: list[str]) -> None:
    policy, members = LeastOutstanding(), members_of(names)
    assert [policy.choose(members, {}) for _ in members] == members


def test_random_chooses_each_about_as_often() -> None:
    policy, members = Random(seed=1), members_of(["a", "b", "c"])
    counts = Counter(policy.choose(members, {}).endpoint_id for _ in range(3_000))
    assert all(900 < count < 1_100 for count in counts.values())


@given(names, st.lists(keys, min_size=1, max_size=20))
def test_a_key_has_the_same_member_for_everybody(names: list[str], some: list[Any]) -> None:
    here, there = ByKey(), ByKey()
    for key in some:
        one = here.for_key(key).choose(members_of(names), {})
        assert one == there.for_key(key).choose(members_of(names[::-1]), {})


@given(names, st.lists(keys, min_size=1, max_size=20), st.data())
def test_only_the_keys_of_who_leaves_move_and_who_joins_takes_only_its_own(
    names: list[str], some: list[Any], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(names))
    all_of_them, others = members_of(names), members_of([name for name in names if name != gone])
    by_key = ByKey()
    for key in some if others else ():
        before = by_key.for_key(key).choose(all_of_them, {})
        after = by_key.for_key(key).choose(others, {})
        assert after == before or before.endpoint_id == gone


def test_keys_are_spread() -> None:
    by_key, members = ByKey(), members_of(["a", "b", "c", "d"])
    counts = Counter(by_key.for_key(key).choose(members, {}).endpoint_id for key in range(4_000))
    assert all(850 < count < 1_150 for count in counts.values())


@pytest.mark.parametrize("key", [1.5, None, ["a"], {"a": 1}, ("a", object())])
def test_what_differs_between_processes_is_no_key(key: object) -> None:
    with pytest.raises(TypeError, match="a key is"):
        ByKey().for_key(key)


def test_policies_have_names() -> None:
    assert isinstance(policy_of("least"), LeastOutstanding)
    own = Random()
    assert policy_of(own) is own
    with pytest.raises(ValueError, match="did you mean 'round-robin'"):
        policy_of("roundrobin")
    with pytest.raises(TypeError, match="a method `choose`"):
        policy_of(LeastOutstanding)  # type: ignore[arg-type]  # the class itself
