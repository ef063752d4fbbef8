"""What shares fixtures stays in one process where pytest-xdist distributes the tests over several (tests/conftest.py)."""

import pytest


def test_this_test_is_in_a_group_where_tests_are_distributed_by_groups(request: pytest.FixtureRequest) -> None:
    # pytest-xdist tells its scheduler the group at the end of the test's id, and says nothing where that has no effect.
    is_by_groups = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@pure/test_distribution") is is_by_groups
