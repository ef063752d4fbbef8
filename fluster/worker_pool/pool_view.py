"""What notebooks show of a worker pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster_bus.messages.notebook import bar, view

if TYPE_CHECKING:
    from fluster.worker_pool.workers import PoolStatus


def pool_view(heading: str, status: PoolStatus | None, state: str = "") -> str:
    """HTML of a pool of that status, if it is known."""
    if status is None:
        return view(heading, {"state": state})
    facts = {
        "state": state,
        "workers": f"{status.workers:,} of {status.wanted:,}",
        "waiting": f"{status.queued:,}",
        "at workers": f"{status.out:,}",
        "done": f"{status.done:,}",
        "failed": f"{status.failed:,}" if status.failed else None,
    }
    over = status.done + status.failed
    total = over + status.queued + status.out
    return view(heading, facts, bar(over, total, f"{over:,} of {total:,} tasks") if total else "")
