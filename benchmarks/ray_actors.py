"""The work of actor_work.py by Ray, in an interpreter that has it: `python -m benchmarks.ray_actors work|start`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray

from benchmarks import actor_work
from benchmarks.actor_work import median_s

_ANSWERED = 200  # tasks, before any are timed


class Echo:
    def echo(self, value: Any) -> Any:
        return value

    def size(self, value: Any) -> int:
        return int(value.nbytes)


def _open(folder: str) -> None:
    ray.init(
        num_cpus=actor_work.ACTORS,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=folder,
        object_store_memory=700 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def _actors(count: int) -> list[Any]:
    kind = ray.remote(num_cpus=0)(Echo)
    actors = [kind.remote() for _ in range(count)]
    ray.get([actor.echo.remote(actor_work.PAYLOAD) for actor in actors])
    return actors


def _out_together(actors: Sequence[Any], count: int) -> Callable[[], object]:
    return lambda: ray.get([actors[each % len(actors)].echo.remote(actor_work.PAYLOAD) for each in range(count)])


def work() -> actor_work.Figures:
    import numpy as np
    from ray.util.multiprocessing import Pool

    figures: actor_work.Figures = {}
    out, tasks, rounds = actor_work.OUT, actor_work.TASKS, actor_work.TASK_ROUNDS
    eight = _actors(actor_work.BROADCAST_TO)
    figures["broadcasts"] = 1 / median_s(_out_together(eight, len(eight)), actor_work.BROADCASTS, warm_up=20)
    four, rest = eight[: actor_work.ACTORS], eight[actor_work.ACTORS :]
    for each in rest:
        ray.kill(each)
    one = four[0]
    figures["call_s"] = median_s(
        lambda: ray.get(one.echo.remote(actor_work.PAYLOAD)), actor_work.CALLS, warm_up=actor_work.WARM_UP
    )
    for key, actors in (("futures_of_one", [one]), ("futures_of_four", four)):
        figures[key] = out / median_s(_out_together(actors, out), actor_work.BATCHES, warm_up=2)
    small = os.urandom(actor_work.MIB)
    echo_s = median_s(lambda: ray.get(one.echo.remote(small)), actor_work.ECHOES, warm_up=5)
    figures["echo_mb_s"] = actor_work.MIB / 1e6 / echo_s
    large = np.frombuffer(bytearray(os.urandom(actor_work.LARGE)), dtype=np.uint8)

    def size() -> None:
        assert ray.get(one.size.remote(large)) == actor_work.LARGE

    figures["large_first_s"] = median_s(size, 1, warm_up=0)
    figures["large_warm_s"] = median_s(size, actor_work.LARGE_CALLS, warm_up=2)
    for each in four:
        ray.kill(each)
    same = ray.remote(abs_of)
    ray.get([same.remote(each) for each in range(_ANSWERED)])
    figures["tasks"] = tasks / median_s(
        lambda: ray.get([same.remote(each) for each in range(tasks)]), rounds, warm_up=0
    )
    pool = Pool(actor_work.ACTORS)
    figures["tasks_in_chunks"] = tasks / median_s(lambda: pool.map(abs, range(tasks)), rounds, warm_up=1)
    pool.terminate()
    return figures


def abs_of(value: int) -> int:
    return abs(value)


def start() -> None:
    actors = _actors(1)
    actor_work.say(actor_work.REPLIED)
    actors += _actors(actor_work.ACTORS - 1)
    actor_work.say(actor_work.ALL_THERE)
    actor_work.wait_until_measured()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        _open(folder)
        try:
            if sys.argv[1] == "start":
                start()
            else:
                actor_work.tell(work())
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
