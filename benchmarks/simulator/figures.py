"""What a simulation reports."""

from __future__ import annotations

from array import array

from fluster_bus.messages import JobStatus


class Figures:
    """Counted while it runs."""

    def __init__(self, total_cpu: float) -> None:
        self.ended: dict[JobStatus, int] = {}  # {state: jobs that ended so}
        self.finished = 0
        self.retried = 0  # attempts after the first
        self.released = 0  # jobs, by the end of those that they were to run after
        self.gangs_started = 0  # also once more
        self.holds_released = 0  # of gangs that could not be had at once
        self.lost_workers = 0
        self.longest_queue = 0
        # Of each attempt: from when it may be offered to its claim, or to the go of its gang.
        self.placement_s = array("d")
        self.gang_placement_s = array("d")
        # CPU seconds, given away and there, as long as jobs are submitted
        self._is_counting = True
        self._busy_cpu, self._up_cpu = 0.0, total_cpu
        self._busy_cpu_s = self._up_cpu_s = self._counted_until = 0.0

    def on_ended(self, state: JobStatus) -> None:
        self.ended[state] = self.ended.get(state, 0) + 1
        self.finished += 1

    def on_cpu(self, now: float, *, busy: float = 0.0, up: float = 0.0) -> None:
        """So much more, or less, is given away or there from now on."""
        if self._is_counting:
            passed_s, self._counted_until = now - self._counted_until, now
            self._busy_cpu_s += passed_s * self._busy_cpu
            self._up_cpu_s += passed_s * self._up_cpu
        self._busy_cpu += busy
        self._up_cpu += up

    def on_last_submitted(self, now: float) -> None:
        self.on_cpu(now)
        self._is_counting = False

    @property
    def utilisation(self) -> float:
        """CPUs given away of those that were up, from the first submission to the last."""
        return self._busy_cpu_s / self._up_cpu_s if self._up_cpu_s else 0.0
