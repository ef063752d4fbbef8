"""What a call to an actor costs, against a bare request of nats-py between two processes on the same server."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import nats
import uvloop

from benchmarks.row import Row
from fluster import ActorPool, LocalCluster, actor, deploy

CALLS = 2_000
SUBMITTED = 1_000
STREAMED = 20_000
ROUNDS = 5
BROADCASTS = 200
BROADCAST_TO = 8
WARM_UP = 200
PAYLOAD = b"x" * 16

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


def _median_latency_us(call: Callable[[], object], calls: int = CALLS) -> float:
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3


def _best_rate(run: Callable[[], object], count: int = SUBMITTED) -> float:
    run()
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        run()
        rates.append(count / (time.perf_counter() - started))
    return statistics.median(rates)


async def _bare(address: str) -> tuple[float, float]:
    """Latency in µs and requests a second of `nc.request`, all of it on uvloop."""
    client = await nats.connect(address)

    async def request() -> None:
        await client.request("bench.echo", PAYLOAD, timeout=10)

    for _ in range(WARM_UP):
        await request()
    times = []
    for _ in range(CALLS):
        started = time.perf_counter_ns()
        await request()
        times.append(time.perf_counter_ns() - started)
    rates = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await asyncio.gather(*(request() for _ in range(SUBMITTED)))
        rates.append(SUBMITTED / (time.perf_counter() - began))
    await client.close()
    return statistics.median(times) / 1e3, statistics.median(rates)


def _submit_all(pool: ActorPool[Echo]) -> None:
    futures = [pool.submit().echo(PAYLOAD) for _ in range(SUBMITTED)]
    for future in futures:
        future.result()


def _read_all(pool: ActorPool[Echo]) -> None:
    for _ in pool.call().count(STREAMED):
        pass


def run() -> list[Row]:
    """Latency of `call()`, and how many submitted calls are answered, or items of a stream read, in a second."""
    with LocalCluster() as cluster:
        server = subprocess.Popen([sys.executable, "-c", _BARE_SERVER, cluster.address], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            server.stdout.readline()
            bare_us, bare_rate = uvloop.run(_bare(cluster.address))
        finally:
            server.kill()
            server.communicate()
        pool = deploy(cluster, Echo)
        pools = deploy(cluster, Echo, name="four", replicas=4)
        call_us = _median_latency_us(lambda: pool.call().echo(PAYLOAD))
        async_us = _median_latency_us(lambda: pool.call().echo_later(PAYLOAD))
        rate = _best_rate(lambda: _submit_all(pool))
        eight = deploy(cluster, Echo, name="eight", replicas=BROADCAST_TO)
        broadcast_us = _median_latency_us(lambda: eight.broadcast().echo(PAYLOAD).results(), calls=BROADCASTS)
        eight.shutdown()
        rate_of_four = _best_rate(lambda: _submit_all(pools))
        streamed = _best_rate(lambda: _read_all(pool), STREAMED)
    latency, throughput = f"nc.request {bare_us:.0f} µs", f"nc.request {bare_rate:,.0f}/s"
    return [
        Row("blocking call(), p50", f"{call_us:.0f} µs", latency, call_us / bare_us),
        Row("the same, async method", f"{async_us:.0f} µs", latency, async_us / bare_us),
        Row(
            f"broadcasts to {BROADCAST_TO} and their answers",
            f"{1e6 / broadcast_us:,.0f}/s",
            latency,
            broadcast_us / bare_us,
        ),
        Row(f"{SUBMITTED:,} submitted calls, 1 actor", f"{rate:,.0f}/s", throughput, rate / bare_rate),
        Row(f"{SUBMITTED:,} submitted calls, 4 actors", f"{rate_of_four:,.0f}/s", throughput, rate_of_four / bare_rate),
        Row(f"{STREAMED:,} small items of a stream, 1 actor", f"{streamed:,.0f}/s", throughput, streamed / bare_rate),
    ]
