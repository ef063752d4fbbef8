"""Who understands whom."""

import pytest

from fluster_bus.core.errors import BusyError, ServiceError, WireVersionError, service_error
from fluster_bus.messages.parts.wire_range import SPOKEN, WireRange, why_apart
from fluster_bus.messages.workers import WorkerInfo


def _range(oldest: int, newest: int) -> WireRange:
    return WireRange(newest=newest, oldest=oldest)


@pytest.mark.parametrize(
    ("theirs", "spoken", "older"),
    [
        (_range(1, 1), _range(1, 1), None),
        (_range(1, 2), _range(1, 1), None),
        (_range(2, 4), _range(4, 5), None),
        (None, _range(1, 7), None),
        (_range(2, 3), _range(1, 1), "w9"),
        (_range(1, 1), _range(2, 3), "w1"),
        (None, _range(2, 3), "w1"),
    ],
    ids=["same", "newer-that-speaks-old", "one-in-common", "unstated", "we-are-old", "they-are-old", "unstated-is-old"],
)
def test_two_programs_need_a_version_in_common(theirs: WireRange | None, spoken: WireRange, older: str | None) -> None:
    why = why_apart(theirs, "w1", here="w9", spoken=spoken)
    if older is None:
        assert why is None
    else:
        assert why is not None
        assert why.endswith(f"update {older}")
        assert str(theirs or _range(1, 1)) in why
        assert str(spoken) in why


def test_what_is_spoken_is_stated_in_full() -> None:
    """Also where it is what was spoken before there were numbers: a person reads it."""
    told = HEARD.model_copy(update={"wire": SPOKEN}).to_json()
    assert f'"wire":{{"newest":{SPOKEN.newest},"oldest":{SPOKEN.oldest}}}'.encode() in told


HEARD = WorkerInfo.from_json(
    b'{"worker_id":"w1","host":"h","pid":1,"total":{},"version":"0","python":"3","started_at":1}'
)


def test_the_error_is_the_same_at_both_ends() -> None:
    sent = WireVersionError("update this")
    arrived = service_error(sent.code, str(sent))
    assert type(arrived) is WireVersionError
    assert str(arrived) == "update this"
    assert type(service_error("BusyError", "")) is BusyError
    assert type(service_error("Other", "")) is ServiceError
