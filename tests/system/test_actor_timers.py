"""`@every` in a process of its own on a cluster."""

from __future__ import annotations

from fluster import ActorContext, LocalCluster, actor, deploy, every
from fluster_bus.core.names import unique_name
from tests.waiting import wait_until


@actor
class Beating:
    def __init__(self) -> None:
        self.runs: list[tuple[str | None, str | None]] = []

    @every(0.02)
    async def _beat(self, ctx: ActorContext) -> None:
        self.runs.append((ctx.method, ctx.job_id))

    def seen(self) -> list[tuple[str | None, str | None]]:
        return self.runs


def test_a_deployed_actor_runs_its_timers(cluster: LocalCluster) -> None:
    pool = deploy(cluster, Beating, name=unique_name("beating"))
    try:
        wait_until(lambda: len(pool.call().seen()) >= 3)
        assert {*pool.call().seen()} == {("every-_beat", pool.job_id)}
    finally:
        pool.shutdown()
