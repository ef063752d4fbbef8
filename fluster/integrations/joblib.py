"""joblib on a cluster: `register()`, then `with joblib.parallel_config(backend="fluster"): …`."""

from __future__ import annotations

import functools
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from joblib.parallel import (
    AutoBatchingMixin,
    FallbackToBackend,
    ParallelBackendBase,
    SequentialBackend,
    ThreadingBackend,
    register_parallel_backend,
)

from fluster.cluster import Cluster, Ref
from fluster.cluster.jobs.arguments import check_timeout
from fluster.errors import ActorTimeoutError
from fluster.integrations.joblib_batches import Batches, SharedArrays
from fluster.integrations.joblib_calls import JoblibBatch, JoblibCall
from fluster.integrations.joblib_workers import GivenWorkers, JoblibWorkers, OwnWorkers
from fluster.worker_pool import WorkerPool
from fluster_bus.messages import EnvironmentConfig, ResourceConfig

_READ_ONLY = "r"
_COPIED = (None, "c")  # ways of having arrays that may be written to, and go with each batch
_SILENT = SimpleNamespace(verbose=0)
_TALKATIVE = 10  # from where on joblib tells how it makes its batches


def register() -> None:
    """Make `backend="fluster"` known to joblib, for `parallel_config` and for `Parallel` itself."""
    register_parallel_backend("fluster", FlusterBackend)


class FlusterBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]  # joblib has no types
    """Runs joblib's batches on a `pool`, or else on one of its own: of `num_workers` on the `cluster`.

    `n_jobs=-1` means all of the pool's workers. A pool of its own has as many as n_jobs says, or as the cluster (the
    current one unless given) has room for. It begins with the first call and ends with the backend, thus after the
    block of `parallel_config`; others that ask for the same at the same time share it. A Parallel within a task runs in
    threads there. Raises TypeError and ValueError for what does not go together.
    """

    supports_retrieve_callback = True  # and so `timeout` and generators
    supports_inner_max_num_threads = True
    default_n_jobs = -1

    def __init__(
        self,
        *,
        pool: WorkerPool | None = None,
        cluster: Cluster | None = None,
        num_workers: int | None = None,
        resources: ResourceConfig | None = None,
        environment: EnvironmentConfig | None = None,
        start_timeout: float | None = 60.0,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        kinds = {"pool": WorkerPool, "cluster": Cluster, "resources": ResourceConfig, "environment": EnvironmentConfig}
        given = {"pool": pool, "cluster": cluster, "resources": resources, "environment": environment}
        for name, kind in kinds.items():
            if given[name] is not None and not isinstance(given[name], kind):
                raise TypeError(f"{name}={given[name]!r}: give a {kind.__name__}")
        self._start_timeout = check_timeout(start_timeout)
        self._resources = resources or ResourceConfig()
        self._workers: JoblibWorkers
        if pool is not None:
            ways = {**given, "pool": None, "num_workers": num_workers}
            unused = [name for name, value in ways.items() if value is not None]
            if unused:
                raise TypeError(f"{', '.join(unused)}: give it to {pool!r} when that is made, or leave out pool=")
            self._workers = GivenWorkers(pool)
        else:
            own = self._workers = OwnWorkers(cluster, num_workers, self._resources, environment or EnvironmentConfig())
            weakref.finalize(self, own.leave_soon).atexit = False
        self._arrays = SharedArrays()
        self._calls: weakref.WeakKeyDictionary[Any, JoblibCall] = (
            weakref.WeakKeyDictionary()
        )  # {Parallel: what it runs}
        if isinstance(self._workers, OwnWorkers):
            calls = self._calls  # without the backend, whose end is that of its share in the workers
            self._workers.is_busy = lambda: any(call.is_busy for call in list(calls.values()))
        # There joblib takes further calls from the user's iterator, which the cluster's loop must not wait for.
        self._callbacks = ThreadPoolExecutor(1, "joblib-callbacks")

    # ---- how many ---------------------------------------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many batches can run at a time. Raises ValueError for 0."""
        if n_jobs == 0:
            raise ValueError(
                "n_jobs == 0 in Parallel has no meaning: give how many to run at a time, or -1 for all workers"
            )
        if Batches.in_use:
            effective: int = self._nested().effective_n_jobs(n_jobs)
            return effective
        if n_jobs is None:
            n_jobs = self.default_n_jobs
        return self._workers.limited(n_jobs) if n_jobs > 0 else max(self._workers.most() + 1 + n_jobs, 1)

    def configure(
        self,
        n_jobs: int = 1,
        parallel: Any = None,
        prefer: str | None = None,  # noqa: ARG002 - a hint, overruled by who chose this backend
        require: str | None = None,
        *,
        max_nbytes: int | None = 1 << 20,
        mmap_mode: str | None = _READ_ONLY,
        temp_folder: str | None = None,  # noqa: ARG002 - arrays are not written to files
        verbose: int = 0,  # noqa: ARG002 - what it asks for joblib itself writes
        context: object = None,  # noqa: ARG002 - multiprocessing's, which joblib always gives
        **unknown: object,
    ) -> int:
        """How many batches run at a time for this Parallel, once the first worker is there.

        Raises ActorTimeoutError when none comes in time, TypeError and ValueError for what is not supported.
        """
        if unknown:
            raise TypeError(
                f"Parallel(…, {', '.join(f'{name}=' for name in unknown)}) is not supported by the fluster backend: "
                "what "
                "its workers are to be is given to parallel_config(backend='fluster', …)"
            )
        if require == "sharedmem":
            raise ValueError("require='sharedmem' is not supported by the fluster backend: its workers share no memory")
        if mmap_mode not in (_READ_ONLY, *_COPIED):
            raise ValueError(
                f"mmap_mode={mmap_mode!r} is not supported by the fluster backend: nothing that a worker writes to an "
                "argument comes back; return it, and give mmap_mode='r', or 'c' or None for copies"
            )
        if self.inner_max_num_threads is not None and isinstance(self._workers, GivenWorkers):
            raise ValueError(
                f"inner_max_num_threads={self.inner_max_num_threads} is not supported for a pool that is there: make "
                "it "
                "with environment=create_environment({'OMP_NUM_THREADS': …})"
            )
        if Batches.in_use:  # workers that wait for others of the same cluster would take each other's room
            raise FallbackToBackend(self._nested())
        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        # Its batching asks it for nothing else, and each would keep the other, and the workers, alive.
        self.parallel = parallel if parallel.verbose >= _TALKATIVE else _SILENT
        pool = functools.partial(self._workers.pool, count, self._thread_limits())
        self._wait_for_worker(pool())
        shares = mmap_mode == _READ_ONLY
        self._calls[parallel] = JoblibCall(pool, count, max_nbytes if shares else None, self._callbacks)
        return count

    def _nested(self) -> ParallelBackendBase:
        """What runs a Parallel within a task: threads, and further down one call after the other."""
        level = max(self.nesting_level or 0, 1)
        return ThreadingBackend(nesting_level=level) if level == 1 else SequentialBackend(nesting_level=level)

    def _thread_limits(self) -> dict[str, str]:
        """Else each of many workers of a machine would have libraries compute with as many threads as that has CPUs."""
        threads = self.inner_max_num_threads or max(int(self._resources.cpu), 1)
        return dict.fromkeys(self.MAX_NUM_THREADS_VARS, str(threads))

    def _wait_for_worker(self, pool: WorkerPool) -> None:
        try:
            pool.wait_for_workers(1, self._start_timeout)
        except ActorTimeoutError as error:
            self._workers.end()  # they would wait on, without a user
            raise ActorTimeoutError(
                f"{pool.name} had no worker after {self._start_timeout:g} s: `fluster ps` and `fluster explain` tell "
                "what "
                "it waits for; parallel_config(backend='fluster', start_timeout=…) waits for longer"
            ) from error

    # ---- batches ----------------------------------------------------------------------------------------

    def submit(self, func: Any, callback: Any = None) -> JoblibBatch:
        """Have a batch run. What keeps it from that goes to the callback as well: raised here it could be lost."""
        call = self._calls[callback.parallel]
        batch = JoblibBatch(callback)
        batch.encode(func, functools.partial(self._shared, call.least_shared))
        call.add(batch)
        return batch

    def _shared(self, least_bytes: int | None, value: object) -> Ref[object] | None:
        return None if least_bytes is None else self._arrays.of(value, least_bytes, lambda: self._workers.cluster)

    def retrieve_result_callback(self, out: JoblibBatch) -> object:
        """What the batch gave. Raises what one of its calls raised, and what kept it from running."""
        return out.result()

    # ---- the end ----------------------------------------------------------------------------------------

    def abort_everything(self, ensure_ready: bool = True) -> None:  # noqa: ARG002 - workers come back when they are needed
        """Take back what has not begun. Workers of its own that run something that is not waited for are ended."""
        calls = list(self._calls.items())
        # joblib does not say which Parallel it means: several may share this backend.
        aborted = [call for parallel, call in calls if parallel._aborting]  # noqa: SLF001
        running = [call for call in aborted if not call.cancel()]
        if running and not any(call.is_busy for _parallel, call in calls if call not in aborted):
            self._workers.end()

    def stop_call(self) -> None:
        """Free the arrays that were sent once."""
        self._arrays.clear()

    def terminate(self) -> None:
        """Begin the next call without what was learned from this one. The workers stay."""
        self._arrays.clear()
        self.reset_batch_stats()
        self.parallel = _SILENT
