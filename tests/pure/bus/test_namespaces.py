"""What is kept of a namespace: bounded when it is made, and lenient to a newer version."""

from typing import Any

import pytest
from pydantic import ValidationError

from fluster_bus.core.errors import InvalidMessageError, InvalidNameError
from fluster_bus.messages import Namespace, NamespaceQuota, NamespaceRecord, NamespaceState


def test_a_namespace_may_have_all_there_is_unless_it_is_told_otherwise() -> None:
    record = NamespaceRecord(name=Namespace("team-a"))
    assert record.quota == NamespaceQuota(cpus=None, gpus=None, memory=None, waiting_jobs=None)
    assert (record.weight, record.state) == (1.0, NamespaceState.ACTIVE)
    assert NamespaceRecord.from_json(record.to_json()) == record


def test_sizes_are_given_with_units() -> None:
    assert NamespaceQuota.model_validate({"memory": "2GiB"}).memory == 2 << 30


@pytest.mark.parametrize(
    "wrong", [{"cpus": -1}, {"gpus": 1.5}, {"memory": "much"}, {"waiting_jobs": -1}, {"cpus": float("nan")}]
)
def test_a_quota_is_not_negative_and_not_odd(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NamespaceQuota(**wrong)


@pytest.mark.parametrize("wrong", [{"weight": 0}, {"weight": -1}, {"weight": float("inf")}, {"weight": 1e7}])
def test_a_weight_is_above_zero_and_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NamespaceRecord(name=Namespace("team-a"), **wrong)


@pytest.mark.parametrize("name", ["", "a.b", "*", "sys"])
def test_only_what_a_tenant_may_be_called_is_a_namespace(name: str) -> None:
    with pytest.raises((InvalidNameError, InvalidMessageError)):
        NamespaceRecord.from_json(b'{"name":"' + name.encode() + b'"}')


def test_what_a_newer_version_keeps_of_a_namespace_is_passed_on() -> None:
    newer = NamespaceRecord.from_json(b'{"name":"team-a","quota":{"cpus":4,"tpus":8},"colour":"red"}')
    changed = newer.model_copy(update={"weight": 2.0})
    assert b'"tpus":8' in changed.to_json()
    assert b'"colour":"red"' in changed.to_json()
