"""Labels: who has them, who asks for them, and what is said when no worker has them."""

import pytest
from pydantic import ValidationError

from fluster_bus.messages import Capacity, Namespace, ResourceConfig, WorkerId, WorkerInfo
from fluster_bus.messages.parts.resources import (
    GIB,
    WORKER_LABEL,
    as_words,
    from_words,
    given_labels,
    parse_labels,
    with_own_name,
)
from fluster_services.capacity import class_of, classes_covered, describe, fits, minus, misfit, needed, plus

NS = Namespace("default")
IN_A = needed(ResourceConfig(cpu=1, memory=GIB, labels={"zone": "a"}), NS)
A = Capacity(cpu=4, memory=8 * GIB, labels=("disk=ssd", "zone=a"), namespaces=(NS,))
B = Capacity(cpu=4, memory=8 * GIB, labels=("zone=b",), namespaces=(NS,))
NONE = Capacity(cpu=4, memory=8 * GIB, namespaces=(NS,))


def test_a_task_fits_where_all_its_labels_are() -> None:
    assert [fits(IN_A, worker) for worker in (A, B, NONE)] == [True, False, False]
    both = needed(ResourceConfig(labels={"zone": "a", "disk": "hdd"}))
    assert not fits(both, A)
    assert fits(needed(ResourceConfig()), A)


def test_it_is_offered_by_name_alone() -> None:
    assert class_of(IN_A) is None
    assert classes_covered(A) == classes_covered(NONE) != frozenset()


def test_labels_are_not_used_up() -> None:
    assert minus(A, IN_A).labels == A.labels
    assert plus(minus(A, IN_A), IN_A) == A


def test_who_lacks_it_is_told() -> None:
    assert describe(IN_A) == "1 CPU, 1 GiB memory, zone=a"
    assert misfit(IN_A, [("w1", B), ("w2", NONE)]) == "needs 1 CPU, 1 GiB memory, zone=a; no worker has zone=a (zone=b)"
    assert misfit(IN_A, [("w2", NONE)]).endswith("no worker has zone=a (none has labels)")
    large = IN_A.model_copy(update={"cpu": 8.0})
    assert "the largest worker, w1, has 4 CPUs" in misfit(large, [("w1", A), ("w2", NONE)])
    named = NONE.model_copy(update={"labels": (f"{WORKER_LABEL}=w1",)})
    much = needed(ResourceConfig(cpu=1, memory=GIB, disk=GIB))
    assert misfit(much, [("w1", named)]).endswith("the largest worker, w1, has 4 CPUs, 8 GiB memory, no disk")


def test_a_worker_tells_its_labels() -> None:
    info = WorkerInfo(worker_id=WorkerId("w"), host="h", pid=1, total=A, version="0", python="3", started_at=0)
    assert info.labels == {"disk": "ssd", "zone": "a"}
    assert WorkerInfo.from_json(info.to_json()) == info


def test_labels_come_back_from_words() -> None:
    labels = parse_labels(" zone=a, disk=ssd,empty=,url=http://x:1/y ")
    assert labels == {"zone": "a", "disk": "ssd", "empty": "", "url": "http://x:1/y"}
    assert from_words(as_words(labels)) == labels
    assert parse_labels("") == {}


@pytest.mark.parametrize("text", ["zone", "zone=a b", "=a", "-x=a", "k=a=b", f"{'x' * 65}=a", f"k={'x' * 64}"])
def test_what_is_no_label_is_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="invalid label"):
        parse_labels(text)


def test_a_request_with_a_bad_label_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValidationError, match="invalid label"):
        ResourceConfig(labels={"zone": "a,b"})
    with pytest.raises(ValidationError, match="too many"):
        ResourceConfig(labels={str(number): "x" for number in range(65)})


def test_a_worker_has_its_own_name_as_a_label_that_is_not_shown() -> None:
    long = WorkerId("w" * 128)
    words = with_own_name(("fluster.worker=other", "zone=a"), long)
    assert words == (f"fluster.worker={long}", "zone=a")
    assert given_labels(words) == ("zone=a",)
    need = needed(ResourceConfig(cpu=1, memory=GIB, labels={WORKER_LABEL: long, "zone": "a"}))
    there = A.model_copy(update={"labels": words})
    assert fits(need, there)
    assert not fits(need, A)
    assert misfit(need, [("w1", A)]) == (
        f"needs 1 CPU, 1 GiB memory, zone=a, worker {long}; no worker {long} takes work now (w1 does)"
    )
    without = there.model_copy(update={"labels": with_own_name((), long)})
    assert misfit(need, [(long, without)]).endswith(f"worker {long} has no zone=a (it has no labels)")
    assert misfit(IN_A, [(long, without)]).endswith("no worker has zone=a (none has labels)")
