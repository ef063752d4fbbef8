"""Pools of workers that run functions."""

from fluster.worker_pool.async_pool import AsyncWorkerPool
from fluster.worker_pool.executor import PoolExecutor
from fluster.worker_pool.pool import WorkerPool
from fluster.worker_pool.results import AsyncMapResult, AsyncUnorderedResults, MapResult, UnorderedResults
from fluster.worker_pool.workers import PoolStatus

__all__ = [
    "AsyncMapResult",
    "AsyncUnorderedResults",
    "AsyncWorkerPool",
    "MapResult",
    "PoolExecutor",
    "PoolStatus",
    "UnorderedResults",
    "WorkerPool",
]
