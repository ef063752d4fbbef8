"""When a task has more on disk than it asked for, and what its end is called then."""

import pytest

from fluster_bus.messages import JobStatus
from fluster_services.worker.attempt_directory import ExitRecord
from fluster_services.worker.disk_watch import failed_if_over, why_over
from fluster_services.worker.outcome import outcome

MIB = 1 << 20


@pytest.mark.parametrize(("size", "limit"), [(1 << 40, None), (1 << 40, 0), (16 * MIB, 16 * MIB), (0, 1)])
def test_who_asked_for_none_or_keeps_to_it_goes_on(size: int, limit: int | None) -> None:
    assert why_over(size, limit) is None


def test_who_has_more_has_failed() -> None:
    why = why_over(20 * MIB, 16 * MIB)
    assert why == "over its disk limit of 16 MiB: its own folder has 20 MiB"
    ended = failed_if_over(outcome(ExitRecord(exit_code=None, signal=15, reason="killed", kill_reason=why)))
    assert (ended.state, ended.reason) == (JobStatus.FAILED, f"stopped: {why}")


@pytest.mark.parametrize("reason", ["killed", "exited"])
def test_other_ends_are_what_they_were(reason: str) -> None:
    ended = outcome(ExitRecord(exit_code=1, signal=None, reason=reason, kill_reason="enough"))  # type: ignore[arg-type]
    assert failed_if_over(ended) == ended
