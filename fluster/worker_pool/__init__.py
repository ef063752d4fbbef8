"""Pools of workers that run functions."""

from fluster.worker_pool.executor import PoolExecutor
from fluster.worker_pool.pool import WorkerPool
from fluster.worker_pool.results import MapResult, UnorderedResults
from fluster.worker_pool.workers import PoolStatus

__all__ = ["MapResult", "PoolExecutor", "PoolStatus", "UnorderedResults", "WorkerPool"]
