"""How a store is divided among namespaces, and a namespace's budget among its streams."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core.errors import NamespaceFullError, StorageError
from fluster_bus.core.stream_bounds import (
    MAX_BUDGET_BYTES,
    MAX_CALL_BYTES,
    MIN_BUDGET_BYTES,
    SHARES,
    SYSTEM_BYTES,
    NamespaceBounds,
    budgets,
    full_error,
    least_budget,
    object_limit,
    shares,
    stream_of,
)
from fluster_bus.messages.jobs import MAX_REQUEST_BYTES
from fluster_bus.storage.objects import MAX_OBJECT_BYTES

MIB, GIB = 1 << 20, 1 << 30
GIVEN = st.dictionaries(
    st.sampled_from(["logs", "events", "results", "calls"]), st.integers(64 * MIB, 64 * GIB), max_size=4
)


def _bounds(sizes: dict[str, int], budget: int | None = None) -> NamespaceBounds:
    return NamespaceBounds(budget_bytes=budget, **{f"{name}_bytes": size for name, size in sizes.items()})


@given(GIVEN, st.integers(0, 64 * GIB))
def test_the_shares_of_a_budget_fit_into_it_and_each_holds_its_largest_object(sizes: dict[str, int], more: int) -> None:
    budget = least_budget(sizes) + more
    found = shares(budget, sizes)
    assert set(found) == set(SHARES)
    assert sum(found.values()) <= budget
    assert all(found[name] == sizes.get(name, found[name]) for name in found)
    assert all(found[name] >= share.least_bytes for name, share in SHARES.items() if name not in sizes)
    assert all(size <= shares(budget + MIB, sizes)[name] for name, size in found.items())


@given(GIVEN, st.integers(1, 200), st.integers(0, 1 << 44))
def test_what_all_namespaces_have_and_the_system_fit_into_the_store(
    sizes: dict[str, int], namespaces: int, store: int
) -> None:
    bounds = _bounds(sizes)
    tried = list(budgets(store, namespaces, bounds))
    assert all(SYSTEM_BYTES + namespaces * budget <= store for budget in tried)
    assert all(sum(shares(budget, sizes).values()) <= budget for budget in tried)
    assert all(first > second for first, second in itertools.pairwise(tried))
    is_possible = SYSTEM_BYTES + namespaces * least_budget(sizes) <= store
    assert tried[-1:] == ([least_budget(sizes)] if is_possible else [])


def test_by_default_a_namespace_has_its_part_of_the_store() -> None:
    assert next(budgets(16 * GIB, 1, NamespaceBounds())) == 12 * GIB
    assert next(budgets(17 * GIB, 8, NamespaceBounds())) == 2 * GIB
    assert next(budgets(None, 8, NamespaceBounds())) == MAX_BUDGET_BYTES
    assert list(budgets(16 * GIB, 8, NamespaceBounds(budget_bytes=GIB))) == [GIB]  # no other one than was asked for
    found = shares(12 * GIB)
    assert (found["logs"], found["events"], found["results"], found["calls"]) == (GIB, GIB, GIB, GIB // 4)
    assert shares(next(budgets(None, 1, _bounds({"logs": 100 * GIB}))), {"logs": 100 * GIB})["events"] == GIB


def test_no_share_is_smaller_than_its_largest_object_or_that_is_made_smaller() -> None:
    least = shares(MIN_BUDGET_BYTES)
    assert least["jobs"] * 3 // 4 > MAX_REQUEST_BYTES + 10_000 * 2_048
    assert least["calls"] > MAX_CALL_BYTES
    for name, share in SHARES.items():
        limit = object_limit(least[name], MAX_OBJECT_BYTES)
        assert (limit < least[name] < MAX_OBJECT_BYTES) if share.shrinks else True
    assert object_limit(3 * GIB, MAX_OBJECT_BYTES) == MAX_OBJECT_BYTES


def test_a_budget_below_the_largest_objects_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget_bytes=67108864: give a size from \d+ MiB"):
        NamespaceBounds(budget_bytes=64 * MIB)
    with pytest.raises(ValueError, match="budget_bytes=1073741824: give a size from 2225 MiB"):
        NamespaceBounds(budget_bytes=GIB, logs_bytes=2 * GIB)
    with pytest.raises(ValueError, match="less than"):
        shares(MIN_BUDGET_BYTES - 1)


@pytest.mark.parametrize("share", sorted(SHARES))
def test_the_error_about_a_full_share_names_it_and_the_setting(share: str) -> None:
    error = full_error("'a'", stream_of(share, "team-a"))
    assert isinstance(error, NamespaceFullError)
    assert f"namespace 'team-a' has used up its share of the store for {share}" in str(error)
    assert "FLUSTER_NAMESPACE_BUDGET" in str(error)
    assert SHARES[share].setting in str(error)


def test_another_stream_that_is_full_is_named() -> None:
    error = full_error("job a", "FLUSTER_SUBMIT")
    assert not isinstance(error, NamespaceFullError)
    assert isinstance(error, StorageError)
    assert "FLUSTER_SUBMIT is full" in str(error)


def test_who_starts_a_cluster_has_no_models_in_memory() -> None:
    """All its processes are copies of that one: a start takes longer with them, and jobs find no plugins of their own."""
    code = "import sys, fluster_services.supervisor; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
