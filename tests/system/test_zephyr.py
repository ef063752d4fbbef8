"""Zephyr pipelines on Fluster, with workers that are processes and in containers, do what they do in Zephyr's own process."""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fluster.cluster import LocalCluster
from tests.optional import import_or_skip
from tests.waiting import wait_until

import_or_skip("zephyr", "`make setup-zephyr` installs it")

from fray.local_backend import LocalClient
from fray.types import ResourceConfig
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from zephyr.dataset import Dataset
from zephyr.runners import InlineRunner
from zephyr.stage_io import ZephyrWorkerError

from fluster.integrations.fray import FlusterClient
from fluster.integrations.zephyr import FlusterBackend
from fluster.integrations.zephyr_coordinators import ZephyrContext
from fluster_services.vm.container import VM_LABEL
from tests.system import zephyr_stages as stages
from tests.system.either_cluster import EitherCluster
from tests.system.zephyr_stages import DieOnce, StayOnce

pytestmark = pytest.mark.slow

NUMBERS = list(range(40))
PATIENCE_S = 120

# In 0.2.20 a context runs one pipeline at a time, each with a coordinator and workers of its own, which start for seconds:
# some pipelines stand for all.
POOLS_ARE_SHARED = hasattr(ZephyrContext, "__enter__")


@pytest.fixture(scope="module")
def pool(either: EitherCluster) -> Iterator[ZephyrContext]:
    """Two workers on Fluster, for all pipelines that leave them alive."""
    client = FlusterClient(either.cluster)
    context = ZephyrContext(
        client=client,
        max_workers=2,
        resources=ResourceConfig(cpu=1, ram="512m"),
        coordinator_resources=ResourceConfig(cpu=0.1, ram="512m"),
        chunk_storage_prefix=str(either.folder()),
        stage_runner_factory=InlineRunner,
        name="shared",
    )
    with context if POOLS_ARE_SHARED else contextlib.nullcontext():
        yield context
        client.shutdown()  # at once: workers that are idle hear of the context's end only when they next ask for work
    wait_until(lambda: not _living(either.cluster, "zephyr-"), describe=lambda: _living(either.cluster, "zephyr-"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZephyrContext]:
    """Zephyr's own client, in this process."""
    client = LocalClient()
    context = ZephyrContext(
        client=client, max_workers=2, chunk_storage_prefix=str(tmp_path_factory.mktemp("own")), name="own"
    )
    with context if POOLS_ARE_SHARED else contextlib.nullcontext():
        yield context
    client.shutdown()


def _living(cluster: LocalCluster, prefix: str) -> list[str]:
    return [job.job_id for job in cluster.list_jobs() if job.job_id.startswith(prefix) and not job.status.finished()]


def _numbers(shards: int = 4) -> Dataset[int]:
    return Dataset.from_list(NUMBERS).reshard(shards)


def _rows() -> Dataset[dict[str, Any]]:
    return _numbers().map(stages.row)


def _grouped(pick: Callable[[int], int]) -> Dataset[dict[str, Any]]:
    return (
        _rows()
        .map(lambda found: {**found, "id": pick(found["id"])})
        # Sorted, as Zephyr gives a group's items in the order in which the shards before it came to an end.
        .group_by(key=stages.row_id, reducer=stages.first, sort_by=lambda found: found["name"], num_output_shards=3)
    )


PIPELINES: dict[str, Callable[[], Dataset[Any]]] = {
    "map": lambda: _numbers().map(stages.double),
    "a lambda": lambda: _numbers().map(lambda number: number + len(NUMBERS)),
    "filter": lambda: _numbers().filter(stages.is_third),
    "flat_map": lambda: _numbers().flat_map(stages.spread),
    "window": lambda: _numbers().window(3),
    "take_per_shard": lambda: _numbers().take_per_shard(2),
    "map_shard": lambda: _numbers().map_shard(lambda items, shard: iter([(shard.shard_idx, sum(items))])),
    "chain": lambda: _numbers().map(stages.double).filter(stages.is_third).flat_map(stages.spread).window(2),
    "group_by": lambda: _numbers().group_by(key=stages.last_digit, reducer=stages.total),
    "group_by, sorted": lambda: _numbers().group_by(
        key=stages.last_digit, reducer=lambda key, items: (key, list(items)), sort_by=lambda number: -number
    ),
    "group_by into shards": lambda: _numbers().group_by(
        key=stages.last_digit, reducer=stages.total, num_output_shards=3
    ),
    "reduce": lambda: _numbers().reduce(sum),
    "count": lambda: _numbers().filter(stages.is_third).count(),
    "deduplicate": lambda: _numbers().map(stages.last_digit).deduplicate(key=lambda digit: digit),
    "join": lambda: _grouped(stages.double).sorted_merge_join(
        _grouped(stages.last_digit), left_key=stages.row_id, right_key=stages.row_id
    ),
    "left join": lambda: _grouped(stages.double).sorted_merge_join(
        _grouped(stages.last_digit),
        left_key=stages.row_id,
        right_key=stages.row_id,
        combiner=lambda left, right: (left["id"], right and right["name"]),
        how="left",
    ),
    "one shard": lambda: _numbers(1).map(stages.double),
    "more shards than items": lambda: Dataset.from_list([1, 2]).reshard(5).map(stages.double),
    "nothing": lambda: Dataset.from_list([]).map(stages.double),
    "nothing is left": lambda: _numbers().filter(lambda number: number < 0).map(stages.double),
}
FORMS = ["jsonl", "jsonl.gz", "parquet", "text"]
if not POOLS_ARE_SHARED:
    PIPELINES = {name: PIPELINES[name] for name in ("a lambda", "group_by into shards", "left join", "nothing")}
    FORMS = ["parquet"]


_Outcomes = dict[str, tuple[Future[list[Any]], Future[list[Any]]]]


@pytest.fixture(scope="module")
def outcomes(pool: ZephyrContext, own: ZephyrContext) -> Iterator[_Outcomes]:
    """{pipeline: (on Fluster, locally)}; several run at a time, where they can, as idle workers ask at long intervals."""

    def run(context: ZephyrContext, name: str) -> list[Any]:
        return list(context.execute(PIPELINES[name]()).results)

    with ThreadPoolExecutor(8 if POOLS_ARE_SHARED else 1) as threads:
        yield {name: (threads.submit(run, pool, name), threads.submit(run, own, name)) for name in PIPELINES}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_what_it_gives_locally(name: str, outcomes: _Outcomes) -> None:
    found, expected = (future.result() for future in outcomes[name])
    assert sorted(map(repr, found)) == sorted(map(repr, expected))
    assert bool(found) is not name.startswith("nothing")


@pytest.mark.parametrize("form", FORMS)
def test_files_are_written_and_read_as_they_are_locally(
    form: str, pool: ZephyrContext, own: ZephyrContext, either: EitherCluster
) -> None:
    contents = []
    place = either.folder()
    for context, folder in ((pool, place / "fluster"), (own, place / "local")):
        pattern = f"{folder}/part-{{shard:03d}}.{form}"
        rows = _rows()
        if form == "parquet":
            written = rows.write_parquet(pattern)
        elif form == "text":
            written = rows.map(lambda found: f"{found['name']}\n".encode()).write_binary(pattern)
        else:
            written = rows.write_jsonl(pattern)
        paths = sorted(map(str, context.execute(written).results))
        assert [Path(path).name for path in paths] == [f"part-{shard:03d}.{form}" for shard in range(4)]
        source = Dataset.from_files(f"{folder}/*")
        read = source.flat_map(stages.lines_of) if form == "text" else source.load_file()
        contents.append(sorted(map(repr, context.execute(read).results)))
    assert contents[0] == contents[1]
    assert len(contents[0]) == len(NUMBERS)


def test_parquet_is_read_in_batches(pool: ZephyrContext, own: ZephyrContext, either: EitherCluster) -> None:
    folder = either.folder()
    own.execute(_rows().write_parquet(f"{folder}/{{shard}}.parquet"))
    batches = Dataset.from_files(f"{folder}/*.parquet").load_parquet(columns=["id"], batch_mode=True)
    sums = batches.map(lambda batch: (batch.num_rows, sum(batch.column("id").to_pylist())))
    found, expected = (sorted(context.execute(sums).results) for context in (pool, own))
    assert found == expected
    assert sum(rows for rows, _sum in found) == len(NUMBERS)


def test_shared_data_reaches_the_workers(pool: ZephyrContext) -> None:
    from zephyr.worker_context import zephyr_worker_ctx

    pool.put("words", ["a", "b", "c"])
    looked_up = Dataset.from_list([0, 1, 2]).map(lambda index: zephyr_worker_ctx().get_shared("words")[index])
    assert sorted(pool.execute(looked_up).results) == ["a", "b", "c"]


def test_an_exception_in_a_stage_is_raised_as_it_is_locally(pool: ZephyrContext, own: ZephyrContext) -> None:
    for context in (pool, own):
        with pytest.raises(ZephyrWorkerError, match="seven is not to be had"):
            context.execute(_numbers().map(stages.fail_at_seven))
    assert pool.execute(_numbers().map(stages.double)).results  # the pool works on


def test_results_that_cannot_be_pickled_are_told(pool: ZephyrContext) -> None:
    with pytest.raises(ZephyrWorkerError, match="pickle"):
        pool.execute(Dataset.from_list([1]).map(lambda _number: threading.Lock()))


# ---- the backend, whose pipelines have workers of their own -------------------------------------------------


@pytest.fixture
def backend(either: EitherCluster) -> FlusterBackend:
    return FlusterBackend(either.cluster, max_parallelism=2, memory_per_worker="512MiB", storage=str(either.folder()))


def test_pipelines_side_by_side_of_which_one_loses_a_worker_and_one_fails(
    either: EitherCluster, backend: FlusterBackend
) -> None:
    killed = either.folder() / "killed"
    counted = _numbers().map(DieOnce(killed, 7)).group_by(key=stages.last_digit, reducer=stages.total)
    with ThreadPoolExecutor(2) as threads:
        good = threads.submit(backend.execute, counted, name="good")
        bad = threads.submit(backend.execute, _numbers(1).map(stages.fail_at_seven), name="bad")
        assert sorted(good.result()) == [(digit, sum(range(digit, 40, 10))) for digit in range(10)]
        with pytest.raises(ZephyrWorkerError, match="seven is not to be had"):
            bad.result()
    assert killed.exists()
    assert _living(either.cluster, "zephyr-good") == _living(either.cluster, "zephyr-bad") == []


@pytest.mark.parametrize("either", ["containers"], indirect=True)
def test_a_pipeline_comes_through_though_a_container_is_killed_with_all_that_runs_there(
    either: EitherCluster, backend: FlusterBackend
) -> None:
    assert either.engine is not None
    reached = either.folder() / "reached"
    counted = _numbers().map(StayOnce(reached, 7)).group_by(key=stages.last_digit, reducer=stages.total)
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(backend.execute, counted)
        wait_until(lambda: reached.exists() or result.done(), PATIENCE_S)
        (container,) = either.engine.containers(**{VM_LABEL: reached.read_text(encoding="utf-8")})
        either.engine.client.kill(container["Id"])
        assert sorted(result.result()) == [(digit, sum(range(digit, 40, 10))) for digit in range(10)]


@pytest.mark.parametrize("either", ["containers"], indirect=True)
def test_a_pipeline_whose_storage_its_workers_do_not_see_says_so(either: EitherCluster, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/chunks"  # as Zephyr writes the one that it chooses by itself
    backend = FlusterBackend(either.cluster, memory_per_worker="512MiB", storage=storage)
    with pytest.raises(ZephyrWorkerError, match=f"worker-[01] does not see storage='{tmp_path}/chunks'.*DockerBackend"):
        backend.execute(_numbers(1).map(stages.double))
    assert list(tmp_path.glob("chunks/*")) == []


@pytest.mark.parametrize("either", ["processes"], indirect=True)
def test_the_storage_is_the_folder_that_the_program_means(
    either: EitherCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    digits = _numbers(1).group_by(key=stages.last_digit, reducer=stages.total)
    for storage in ("chunks", "~/chunks of mine", tmp_path / "given"):
        backend = FlusterBackend(either.cluster, memory_per_worker="512MiB", storage=storage)
        assert len(backend.execute(digits)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chunks", "given", "home"]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["chunks of mine"]


def test_a_storage_that_cannot_be_used_is_told_before_there_is_a_worker(cluster: LocalCluster, tmp_path: Path) -> None:
    storage = tmp_path / "a file"
    storage.touch()
    backend = FlusterBackend(cluster, storage=storage)
    with pytest.raises(OSError, match=rf"storage={str(storage)!r} cannot be used: File exists"):
        backend.execute(_numbers(1))
    assert _living(cluster, "zephyr-") == []


class OwnMemory(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    pass


def test_a_storage_that_no_other_process_sees_is_refused(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_implementation("own", OwnMemory, clobber=True)
    for storage in ("memory://chunks", "simplecache::memory://chunks", "dir::memory://", "own://chunks"):
        with pytest.raises(ValueError, match=re.escape(f"storage={storage!r} is memory of this process, which no wor")):
            FlusterBackend(cluster, storage=storage)
    FlusterBackend(cluster, storage="memory:chunks")  # a folder, as fsspec reads it
    monkeypatch.setenv("MARIN_PREFIX", "memory://chosen")  # what Zephyr goes by
    with pytest.raises(ValueError, match=r"storage='memory://chosen.*give a folder that all of them see, or a bucket"):
        FlusterBackend(cluster).execute(_numbers(1))
    assert _living(cluster, "zephyr-") == []


def test_what_makes_no_sense_is_refused(cluster: LocalCluster) -> None:
    with pytest.raises(TypeError, match="storage=5"):
        FlusterBackend(cluster, storage=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_parallelism"):
        FlusterBackend(cluster, max_parallelism=0)
    with pytest.raises(ValueError, match="invalid size"):
        FlusterBackend(cluster, memory_per_worker="lots")
