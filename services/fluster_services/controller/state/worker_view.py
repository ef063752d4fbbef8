"""A worker as the scheduler and those who explain its decisions see it."""

from __future__ import annotations

from dataclasses import dataclass

from fluster_bus.messages import Capacity


@dataclass(frozen=True)
class WorkerView:
    """A worker as the controller believes it to be."""

    name: str
    total: Capacity
    free: Capacity
    jobs: tuple[str, ...] = ()  # those whose tasks it holds
