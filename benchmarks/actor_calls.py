"""What a call to an actor costs, against a bare request of nats-py between two processes on the same server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import nats
import uvloop

from benchmarks.actor_work import (
    ACTORS,
    BROADCAST_TO,
    BROADCASTS,
    CALLS,
    OUT,
    PAYLOAD,
    WARM_UP,
    awaited_median_s,
    median_s,
)
from benchmarks.row import Row
from fluster import ActorPool, LocalCluster, actor, deploy

STREAMED = 20_000
ROUNDS = 5

_BARE_SERVER = """
import asyncio, sys, nats, uvloop
async def main():
    client = await nats.connect(sys.argv[1])
    async def echo(msg):
        await client.publish(msg.reply, msg.data)
    await client.subscribe("bench.echo", cb=echo)
    await client.flush()
    print("ready", flush=True)
    await asyncio.Event().wait()
uvloop.run(main())
"""


@actor
class Echo:
    def echo(self, data: bytes) -> bytes:
        return data

    def count(self, end: int) -> Iterator[int]:
        yield from range(end)

    async def echo_later(self, data: bytes) -> bytes:
        return data


def bare_requests(address: str) -> tuple[float, float]:
    """Seconds that `nc.request` takes, and how many are answered in a second, between two processes on uvloop."""
    server = subprocess.Popen([sys.executable, "-c", _BARE_SERVER, address], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        return uvloop.run(_bare(address))
    finally:
        server.kill()
        server.communicate()


async def _bare(address: str) -> tuple[float, float]:
    client = await nats.connect(address)

    async def request() -> None:
        await client.request("bench.echo", PAYLOAD, timeout=10)

    async def together() -> None:
        await asyncio.gather(*(request() for _ in range(OUT)))

    latency = await awaited_median_s(request, CALLS, warm_up=WARM_UP)
    rate = OUT / await awaited_median_s(together, ROUNDS, warm_up=1)
    await client.close()
    return latency, rate


def submit_all(pool: ActorPool[Echo]) -> None:
    futures = [pool.submit().echo(PAYLOAD) for _ in range(OUT)]
    for future in futures:
        future.result()


def _read_all(pool: ActorPool[Echo]) -> None:
    for _ in pool.call().count(STREAMED):
        pass


def run() -> list[Row]:
    """Latency of `call()`, and how many submitted calls are answered, or items of a stream read, in a second."""
    with LocalCluster() as cluster:
        bare_s, bare_rate = bare_requests(cluster.address)
        pool = deploy(cluster, Echo)
        pools = deploy(cluster, Echo, name="four", replicas=ACTORS)
        call_s = median_s(lambda: pool.call().echo(PAYLOAD), CALLS, warm_up=WARM_UP)
        async_s = median_s(lambda: pool.call().echo_later(PAYLOAD), CALLS, warm_up=WARM_UP)
        rate = OUT / median_s(lambda: submit_all(pool), ROUNDS, warm_up=1)
        eight = deploy(cluster, Echo, name="eight", replicas=BROADCAST_TO)
        broadcast_s = median_s(lambda: eight.broadcast().echo(PAYLOAD).results(), BROADCASTS, warm_up=WARM_UP)
        timed_s = median_s(
            lambda: eight.broadcast(timeout=60).echo(PAYLOAD).results(timeout=60), BROADCASTS, warm_up=WARM_UP
        )
        eight.shutdown()
        rate_of_four = OUT / median_s(lambda: submit_all(pools), ROUNDS, warm_up=1)
        streamed = STREAMED / median_s(lambda: _read_all(pool), ROUNDS, warm_up=1)
    latency, throughput = f"nc.request {bare_s * 1e6:.0f} µs", f"nc.request {bare_rate:,.0f}/s"
    return [
        Row("blocking call(), p50", f"{call_s * 1e6:.0f} µs", latency, call_s / bare_s),
        Row("the same, async method", f"{async_s * 1e6:.0f} µs", latency, async_s / bare_s),
        Row(
            f"broadcasts to {BROADCAST_TO} and their answers",
            f"{1 / broadcast_s:,.0f}/s",
            latency,
            broadcast_s / bare_s,
        ),
        Row("the same, with time-outs", f"{1 / timed_s:,.0f}/s", latency, timed_s / bare_s),
        Row(f"{OUT:,} submitted calls, 1 actor", f"{rate:,.0f}/s", throughput, rate / bare_rate),
        Row(
            f"{OUT:,} submitted calls, {ACTORS} actors", f"{rate_of_four:,.0f}/s", throughput, rate_of_four / bare_rate
        ),
        Row(f"{STREAMED:,} small items of a stream, 1 actor", f"{streamed:,.0f}/s", throughput, streamed / bare_rate),
    ]
