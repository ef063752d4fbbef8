"""The work of actor_work.py by xoscar, in an interpreter that has it: `python -m benchmarks.xoscar_actors work|start`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import xoscar

from benchmarks import actor_work
from benchmarks.actor_work import awaited_median_s


class Echo(xoscar.Actor):  # type: ignore[misc, unused-ignore]
    async def echo(self, value: Any) -> Any:
        return value

    async def size(self, value: Any) -> int:
        return int(value.nbytes)


class Batched(xoscar.Actor):  # type: ignore[misc, unused-ignore]
    @xoscar.extensible  # type: ignore[untyped-decorator, unused-ignore]
    def echo(self, value: Any) -> Any:
        return value


def _processes(count: int) -> Awaitable[AbstractAsyncContextManager[Any]]:
    made: Awaitable[AbstractAsyncContextManager[Any]] = xoscar.create_actor_pool(
        "127.0.0.1:0", n_process=count, use_uvloop="auto"
    )
    return made


async def _actors(pool: Any, count: int, kind: type[Any] = Echo) -> list[Any]:
    places = list(pool.sub_processes)
    return [
        await xoscar.create_actor(kind, address=places[number % len(places)], uid=f"{kind.__name__}-{number}")
        for number in range(count)
    ]


def _out_together(actors: Sequence[Any], count: int) -> Callable[[], Awaitable[object]]:
    async def call() -> None:
        await asyncio.gather(*(actors[each % len(actors)].echo(actor_work.PAYLOAD) for each in range(count)))

    return call


async def work() -> actor_work.Figures:
    figures: actor_work.Figures = {}
    out, tasks = actor_work.OUT, actor_work.TASKS
    async with await _processes(actor_work.ACTORS) as pool:
        four = await _actors(pool, actor_work.ACTORS)
        one = four[0]
        figures["call_s"] = await awaited_median_s(
            lambda: one.echo(actor_work.PAYLOAD), actor_work.CALLS, warm_up=actor_work.WARM_UP
        )
        for key, actors in (("futures_of_one", [one]), ("futures_of_four", four)):
            batch = _out_together(actors, out)
            figures[key] = out / await awaited_median_s(batch, actor_work.BATCHES, warm_up=2)
        small = os.urandom(actor_work.MIB)
        echo_s = await awaited_median_s(lambda: one.echo(small), actor_work.ECHOES, warm_up=5)
        figures["echo_mb_s"] = actor_work.MIB / 1e6 / echo_s
        large = np.frombuffer(bytearray(os.urandom(actor_work.LARGE)), dtype=np.uint8)
        figures["large_first_s"] = await awaited_median_s(lambda: one.size(large), 1, warm_up=0)
        figures["large_warm_s"] = await awaited_median_s(lambda: one.size(large), actor_work.LARGE_CALLS, warm_up=2)
        rounds = actor_work.TASK_ROUNDS

        async def one_by_one() -> None:  # not all at once, which is slower
            for _ in range(tasks // out):
                await _out_together(four, out)()

        figures["tasks"] = tasks / await awaited_median_s(one_by_one, rounds, warm_up=1)
        batched = await _actors(pool, actor_work.ACTORS, Batched)
        share = range(tasks // len(batched))

        async def in_batches() -> None:
            await asyncio.gather(*(each.echo.batch(*[each.echo.delay(item) for item in share]) for each in batched))

        figures["tasks_in_chunks"] = tasks / await awaited_median_s(in_batches, rounds, warm_up=1)
    async with await _processes(actor_work.BROADCAST_TO) as pool:
        eight = await _actors(pool, actor_work.BROADCAST_TO)
        broadcast = _out_together(eight, len(eight))
        figures["broadcasts"] = 1 / await awaited_median_s(broadcast, actor_work.BROADCASTS, warm_up=20)
        figures["timed_broadcasts"] = 1 / await awaited_median_s(
            lambda: asyncio.wait_for(broadcast(), 60), actor_work.BROADCASTS, warm_up=20
        )
    return figures


async def start() -> None:
    async with await _processes(actor_work.ACTORS) as pool:
        (one,) = await _actors(pool, 1)
        await one.echo(actor_work.PAYLOAD)
        actor_work.say(actor_work.REPLIED)
        for actor in await _actors(pool, actor_work.ACTORS, Batched):  # all in processes that are there already
            await actor.echo(actor_work.PAYLOAD)
        actor_work.say(actor_work.ALL_THERE)
        actor_work.wait_until_measured()


if __name__ == "__main__":
    from benchmarks import xoscar_actors  # not `__main__`: the other processes must find the same classes

    if sys.argv[1] == "start":
        asyncio.run(xoscar_actors.start())
    else:
        actor_work.tell(asyncio.run(xoscar_actors.work()))
