"""Whatever is set, a task has ended before it is given away."""

import math
from typing import Any

import pytest

from fluster_services.config import LOCAL_TIMING, Timing


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"kill_grace_s": 25},
            "^kill_grace_s=25: with fence_after_s=90 and heartbeat_s=5 it makes 120, which must be less than worker_timeout_s=120",
        ),
        ({"fence_after_s": 105}, "^fence_after_s=105: with .* it makes 120, .*: lower it, or raise worker_timeout_s"),
        (
            {"heartbeat_s": 20.5},
            "^heartbeat_s=20.5: .* 120.5, .* else a task that is slow to end runs beside its retry",
        ),
        (
            {"worker_timeout_s": 105},
            "^worker_timeout_s=105: give more than 105, which fence_after_s=90, .* make together",
        ),
        ({"kill_grace_s": 0}, "kill_grace_s=0: give a number of seconds above 0"),
        ({"hold_s": -1}, "hold_s=-1"),
        ({"fence_after_s": math.nan}, "fence_after_s=nan"),
        ({"worker_timeout_s": math.inf}, "worker_timeout_s=inf"),
    ],
)
def test_timings_that_let_a_task_run_beside_its_retry_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Timing(**fields)


@pytest.mark.parametrize("timing", [Timing(), LOCAL_TIMING], ids=["cluster", "LocalCluster"])
def test_the_usual_timings_hold_with_a_heartbeat_to_spare(timing: Timing) -> None:
    assert timing.worker_timeout_s - timing.fence_after_s - timing.kill_grace_s > timing.heartbeat_s
