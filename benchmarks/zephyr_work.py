"""`python -m benchmarks.zephyr_work SIDE`: what Zephyr takes for some pipelines on Fluster, on Iris' local cluster, or on its LocalClient."""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.actor_work import Figures, tell

WORKERS, ROUNDS = 2, 2
# In a row, of which the mean is taken: how soon idle workers ask for work again is chance.
TIMES = {"small_s": 20}
ROWS, KEYS = 1_000_000, 1_000
SHARDS = 4


def words_of(path: str) -> Iterator[str]:
    yield from re.findall(r"\w+", Path(path).read_text(encoding="utf-8", errors="replace"))


def count(word: object, found: Iterator[object]) -> tuple[object, int]:
    return word, sum(1 for _ in found)


def same(word: str) -> str:
    return word


def rows_of(shard: int) -> Iterator[int]:
    yield from range(shard, ROWS, SHARDS)


def key_of(row: int) -> int:
    return row % KEYS


def double(number: int) -> int:
    return 2 * number


def is_third(number: int) -> bool:
    return number % 3 == 0


@contextlib.contextmanager
def _client(side: str) -> Iterator[Any]:
    if side == "fluster":
        from fluster import LocalCluster
        from fluster.integrations.zephyr import PipelineClient

        with LocalCluster() as cluster:
            yield PipelineClient(cluster)
    elif side == "iris":
        from fray.iris_backend import FrayIrisClient
        from iris.client.local_client import local_client

        with local_client() as iris:
            yield FrayIrisClient.from_iris_client(iris)
    else:
        from fray.local_backend import LocalClient

        yield LocalClient()


def _pipelines() -> dict[str, Callable[[], tuple[Any, int]]]:
    """{figure: (dataset, how many results there are to be)}"""
    from zephyr.dataset import Dataset

    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(map(str, (*folder.glob("*.py"), *folder.glob("asyncio/*.py"), *folder.glob("email/*.py"))))
    words = {word for path in paths for word in words_of(path)}
    return {
        "small_s": lambda: (Dataset.from_list(list(range(20))).reshard(SHARDS).map(double).filter(is_third), 7),
        "words_s": lambda: (
            Dataset.from_list(paths)
            .reshard(SHARDS)
            .flat_map(words_of)
            .group_by(key=same, reducer=count, num_output_shards=SHARDS),
            len(words),
        ),
        "group_by_s": lambda: (
            Dataset.from_list(list(range(SHARDS)))
            .flat_map(rows_of)
            .group_by(key=key_of, reducer=count, num_output_shards=SHARDS),
            KEYS,
        ),
    }


def figures(side: str) -> Figures:
    """Seconds: until a pool has its first worker, and for each pipeline on it; medians of some rounds."""
    from fray.types import ResourceConfig
    from zephyr.context import ZephyrContext
    from zephyr.runners import InlineRunner

    # Iris' one machine has less disk than each asks for who names none.
    disk = {"disk": "1g"} if side == "iris" else {}
    rounds: list[Figures] = []
    pipelines = _pipelines()
    with tempfile.TemporaryDirectory() as folder, _client(side) as client:
        for _ in range(ROUNDS):
            context = ZephyrContext(
                client=client,
                max_workers=WORKERS,
                resources=ResourceConfig(cpu=1, ram="1g", **disk),
                coordinator_resources=ResourceConfig(cpu=0.1, ram="1g", **disk),
                chunk_storage_prefix=folder,
                stage_runner_factory=InlineRunner,
            )
            began = time.perf_counter()
            with context:
                taken = {"ready_s": time.perf_counter() - began}
                for name, pipeline in pipelines.items():
                    times = TIMES.get(name, 1)
                    prepared = [pipeline() for _ in range(times)]
                    began = time.perf_counter()
                    for dataset, results in prepared:
                        assert len(context.execute(dataset).results) == results, name
                    taken[name] = (time.perf_counter() - began) / times
            rounds.append(taken)
    return {name: statistics.median(taken[name] for taken in rounds) for name in rounds[0]}


if __name__ == "__main__":
    tell(figures(sys.argv[1]))
