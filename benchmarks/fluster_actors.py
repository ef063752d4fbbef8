"""The work of actor_work.py by Fluster, in a process of its own: `python -m benchmarks.fluster_actors`.

The start is first_reply.py: a user's script imports nothing but what it uses.
"""

from __future__ import annotations

from benchmarks import actor_work, payloads
from benchmarks.actor_calls import Echo, bare_requests, submit_all
from benchmarks.actor_work import ACTORS, BATCHES, BROADCAST_TO, CALLS, OUT, PAYLOAD, TASKS, median_s
from fluster import LocalCluster, WorkerPool, deploy


def work() -> actor_work.Figures:
    with LocalCluster() as cluster:
        bare_s, _ = bare_requests(cluster.address)
        one = deploy(cluster, Echo)
        four = deploy(cluster, Echo, name="four", replicas=ACTORS)
        eight = deploy(cluster, Echo, name="eight", replicas=BROADCAST_TO)
        figures = {
            "bare_s": bare_s,
            "call_s": median_s(lambda: one.call().echo(PAYLOAD), CALLS, warm_up=actor_work.WARM_UP),
            "futures_of_one": OUT / median_s(lambda: submit_all(one), BATCHES, warm_up=2),
            "futures_of_four": OUT / median_s(lambda: submit_all(four), BATCHES, warm_up=2),
            "broadcasts": 1
            / median_s(lambda: eight.broadcast().echo(PAYLOAD).results(), actor_work.BROADCASTS, warm_up=20),
            "timed_broadcasts": 1
            / median_s(
                lambda: eight.broadcast(timeout=60).echo(PAYLOAD).results(timeout=60),
                actor_work.BROADCASTS,
                warm_up=20,
            ),
        }
        for pool in (one, four, eight):
            pool.shutdown()
        with WorkerPool(cluster, ACTORS) as workers:
            workers.wait_for_workers(ACTORS)

            def one_by_one() -> None:
                for future in [workers.submit(abs, each) for each in range(TASKS)]:
                    future.result()

            def by_map() -> None:
                workers.map(abs, range(TASKS)).results()

            def in_chunks() -> None:
                workers.map(abs, range(TASKS), chunksize=TASKS // ACTORS).results()

            figures["tasks"] = TASKS / median_s(one_by_one, actor_work.TASK_ROUNDS, warm_up=1)
            figures["map"] = TASKS / median_s(by_map, actor_work.TASK_ROUNDS, warm_up=1)
            figures["tasks_in_chunks"] = TASKS / median_s(in_chunks, actor_work.TASK_ROUNDS, warm_up=1)
    measured = payloads.measure()
    return {
        **figures,
        "echo_mb_s": actor_work.MIB / 1e6 / measured.echo,
        "large_first_s": measured.first,
        "large_warm_s": measured.warm,
    }


if __name__ == "__main__":
    actor_work.tell(work())
