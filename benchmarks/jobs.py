"""What a job costs, against starting a bare `python -c pass`, which is the least that a program can cost.

And against HyperQueue, where it is here: see hyperqueue_jobs.py.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import nats
import psutil
import uvloop

from benchmarks.hyperqueue_jobs import hyperqueue_rate
from benchmarks.noop import noop
from benchmarks.row import Row
from fluster import Cluster, Entrypoint, JobRequest, JobStatus, LocalCluster
from fluster_bus.core import subjects

IN_FLIGHT = 32
ROUNDS = 10  # of as many
ONE_BY_ONE = 50
FEW, MANY = 20, 200
TRIES = 3  # the best counts: others use the machine too
SUBMITTED = 2_000
FINISHED = 64 * IN_FLIGHT
_PYTHON = (sys.executable, "-c", "pass")


def _median_ms(run: Callable[[], object], times: int) -> float:
    run()  # the first one warms up
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def _rate_in_flight(run: Callable[[], object]) -> float:
    """How many are done in a second when there are always as many in flight."""

    def again_and_again(_: int) -> None:
        for _ in range(ROUNDS):
            run()

    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda _: run(), range(IN_FLIGHT)))
        started = time.perf_counter()
        list(threads.map(again_and_again, range(IN_FLIGHT)))
        return IN_FLIGHT * ROUNDS / (time.perf_counter() - started)


def _rate_at_once(cluster: Cluster, request: JobRequest, count: int) -> float:
    """How many end in a second, from the first submit to the last success."""
    rates = []
    for _ in range(TRIES):
        started = time.perf_counter()
        infos = cluster.wait(cluster.launch_many([request] * count))
        rates.append(count / (time.perf_counter() - started))
        assert all(info.status is JobStatus.SUCCEEDED for info in infos)
    return max(rates)


async def _stored_rate(address: str, data: bytes) -> float:
    """How many messages nats-py stores in a stream in a second, 128 out at once as `launch_many` has them."""
    client = await nats.connect(address)
    jetstream = client.jetstream()
    subject = subjects.logs("default", "bench", "0", "1", "stdout")  # of a stream that is there
    room = asyncio.Semaphore(128)

    async def store() -> None:
        async with room:
            await jetstream.publish(subject, data)

    started = time.perf_counter()
    await asyncio.gather(*(store() for _ in range(SUBMITTED)))
    rate = SUBMITTED / (time.perf_counter() - started)
    await client.close()
    return rate


def _submit_rows() -> Iterator[Row]:
    """While nothing has room, so that submitting is all that happens."""
    with LocalCluster(cpu=1) as cluster:
        request = JobRequest(name="waits", entrypoint=Entrypoint(command=("sleep", "1000")))
        stored = uvloop.run(_stored_rate(cluster.address, request.to_json()))
        cluster.launch(request)
        started = time.perf_counter()
        cluster.launch_many([request] * SUBMITTED)
        rate = SUBMITTED / (time.perf_counter() - started)
        yield Row(
            f"{SUBMITTED:,} jobs submitted and recorded, by one client",
            f"{rate:,.0f}/s",
            f"nats-py stores {stored:,.0f}/s",
            rate / stored,
        )


def _memory_row() -> Row:
    """What finished jobs leave in the controller's memory, until their records go."""
    with LocalCluster(cpu=IN_FLIGHT) as cluster:
        function = JobRequest(name="nothing", entrypoint=Entrypoint(callable=noop))
        (controller,) = [
            each for each in psutil.Process().children(recursive=True) if each.name().startswith("fluster-control")
        ]

        def run_jobs(count: int) -> int:
            for _ in range(0, count, IN_FLIGHT):
                cluster.wait(cluster.launch_many([function] * IN_FLIGHT))
            return int(controller.memory_info().rss)

        before = run_jobs(10 * IN_FLIGHT)  # what it needs once
        kb = (run_jobs(FINISHED) - before) / FINISHED / 1e3
    return Row("memory of the controller for each finished job", f"{kb:.1f} KB", target="≤ 6 KB")


def run() -> Iterator[Row]:
    def bare() -> None:
        subprocess.run(_PYTHON, check=True)

    bare_ms, bare_rate = _median_ms(bare, FEW), _rate_in_flight(bare)
    alone, together = f"bare python {bare_ms:.1f} ms", f"bare python {bare_rate:,.0f}/s"
    with LocalCluster(cpu=IN_FLIGHT) as cluster:
        function = JobRequest(name="nothing", entrypoint=Entrypoint(callable=noop))
        command = JobRequest(name="python", entrypoint=Entrypoint(command=_PYTHON))

        def run_job(request: JobRequest) -> None:
            cluster.wait(cluster.launch(request), raise_on_failure=True)

        ms = _median_ms(lambda: run_job(function), ONE_BY_ONE)
        yield Row("no-op function as a job, one at a time, p50", f"{ms:.1f} ms", alone, ms / bare_ms)
        ms = _median_ms(lambda: run_job(command), FEW)
        yield Row("python -c pass as a job, one at a time, p50", f"{ms:.1f} ms", alone, ms / bare_ms)
        _rate_at_once(cluster, function, IN_FLIGHT)  # warm
        for count in (FEW, MANY):
            rate = _rate_at_once(cluster, function, count)
            yield Row(f"{count} no-op functions as jobs, at once", f"{rate:,.0f}/s", together, rate / bare_rate)
        rate = _rate_at_once(cluster, command, FEW)
        yield Row(f"{FEW} python -c pass as jobs, at once", f"{rate:,.0f}/s", together, rate / bare_rate)
        peer = hyperqueue_rate(FEW)  # in between: the cluster idles meanwhile, but for heartbeats
        if peer is not None:
            rate = max(rate, _rate_at_once(cluster, command, FEW))
            yield Row(
                f"{FEW} python -c pass as jobs, at once", f"{rate:,.0f}/s", f"HyperQueue {peer:,.0f}/s", rate / peer
            )
    yield from _submit_rows()
    yield _memory_row()
