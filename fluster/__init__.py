"""Actors and jobs on one message bus."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluster.actors import (
        ActorContext,
        ActorFuture,
        ActorPool,
        ActorServer,
        ActorStream,
        AsyncActorPool,
        AsyncBroadcastResult,
        BroadcastResult,
        ClusterResolver,
        FixedResolver,
        Resolver,
        actor,
        deploy,
        every,
        method,
    )
    from fluster.cluster import AsyncCluster, Cluster, LocalCluster, Ref, TaskContext, current_cluster, current_task
    from fluster.errors import (
        ActorDeadlockError,
        ActorDiedError,
        ActorError,
        ActorFailedError,
        ActorGivenUpError,
        ActorNameTakenError,
        ActorNotFoundError,
        ActorTimeoutError,
        ClusterError,
        ClusterStartError,
        ConnectionLostError,
        FlusterError,
        ForkedError,
        InvalidArgumentsError,
        JobFailedError,
        JobNotFoundError,
        JobRefusedError,
        JobResultError,
        JobTimeoutError,
        MailboxFullError,
        NoClusterError,
        NoTaskError,
        NotRunError,
        PoisonedTaskError,
        QuotaExceededError,
        RemoteError,
        StackError,
        SupersededError,
        WorkerNotFoundError,
        WorkspaceError,
    )
    from fluster.log_context import LogContext
    from fluster.worker_pool import AsyncWorkerPool, WorkerPool
    from fluster_bus.messages import (
        CpuConfig,
        Endpoint,
        EndpointId,
        Entrypoint,
        EnvironmentConfig,
        GpuConfig,
        JobId,
        JobInfo,
        JobRequest,
        JobStatus,
        LogLine,
        Namespace,
        ResourceConfig,
        TaskStatus,
        TpuConfig,
        TpuTopologyInfo,
        WorkerId,
        create_environment,
    )
    from fluster_bus.messages.stacks import JobStack, TaskStack

__all__ = [
    "ActorContext",
    "ActorDeadlockError",
    "ActorDiedError",
    "ActorError",
    "ActorFailedError",
    "ActorFuture",
    "ActorGivenUpError",
    "ActorNameTakenError",
    "ActorNotFoundError",
    "ActorPool",
    "ActorServer",
    "ActorStream",
    "ActorTimeoutError",
    "AsyncActorPool",
    "AsyncBroadcastResult",
    "AsyncCluster",
    "AsyncWorkerPool",
    "BroadcastResult",
    "Cluster",
    "ClusterError",
    "ClusterResolver",
    "ClusterStartError",
    "ConnectionLostError",
    "CpuConfig",
    "Endpoint",
    "EndpointId",
    "Entrypoint",
    "EnvironmentConfig",
    "FixedResolver",
    "FlusterError",
    "ForkedError",
    "GpuConfig",
    "InvalidArgumentsError",
    "JobFailedError",
    "JobId",
    "JobInfo",
    "JobNotFoundError",
    "JobRefusedError",
    "JobRequest",
    "JobResultError",
    "JobStack",
    "JobStatus",
    "JobTimeoutError",
    "LocalCluster",
    "LogContext",
    "LogLine",
    "MailboxFullError",
    "Namespace",
    "NoClusterError",
    "NoTaskError",
    "NotRunError",
    "PoisonedTaskError",
    "QuotaExceededError",
    "Ref",
    "RemoteError",
    "Resolver",
    "ResourceConfig",
    "StackError",
    "SupersededError",
    "TaskContext",
    "TaskStack",
    "TaskStatus",
    "TpuConfig",
    "TpuTopologyInfo",
    "WorkerId",
    "WorkerNotFoundError",
    "WorkerPool",
    "WorkspaceError",
    "actor",
    "create_environment",
    "current_cluster",
    "current_task",
    "deploy",
    "every",
    "method",
]

_SOURCES = (  # those first that take next to no time
    "fluster.errors",
    "fluster.cluster",
    "fluster.actors",
    "fluster.log_context",
    "fluster_bus.messages",
    "fluster.worker_pool",
    "fluster_bus.messages.stacks",
)

# Found when asked for: `fluster --help` imports this package too, and need not wait for what only programs use.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in __all__:
            for source in _SOURCES:
                found = getattr(import_module(source), name, None)
                if found is not None:
                    globals()[name] = found
                    return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
