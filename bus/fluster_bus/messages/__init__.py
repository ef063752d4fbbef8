"""Every message that travels as JSON, one frozen model each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster_bus.core.lazy_imports import lazy_exports

if TYPE_CHECKING:
    from fluster_bus.core.names import EndpointId, JobId, Namespace, WorkerId
    from fluster_bus.messages.endpoints import (
        ActorSeat,
        Endpoint,
        EndpointList,
        EndpointQuery,
        HandledCalls,
        KeptAnswer,
        SavedState,
        TrimCalls,
        UnregisterRequest,
    )
    from fluster_bus.messages.jobs import (
        Entrypoint,
        JobDetails,
        JobInfo,
        JobRequest,
        JobStatus,
        Progress,
        TaskError,
        TaskResult,
        TaskStatus,
    )
    from fluster_bus.messages.logs import LogBatch, LogLine
    from fluster_bus.messages.namespaces import NamespaceQuota, NamespaceRecord, NamespaceState
    from fluster_bus.messages.parts.environments import EnvironmentConfig, create_environment
    from fluster_bus.messages.parts.images import UsedImage
    from fluster_bus.messages.parts.model import Message
    from fluster_bus.messages.parts.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig, parse_size
    from fluster_bus.messages.parts.tpu import TPU_TOPOLOGIES, TpuTopologyInfo, tpu_topology
    from fluster_bus.messages.records import (
        Event,
        Fence,
        JobRecord,
        Leader,
        RefusedJob,
        Replacement,
        TaskRecord,
        Transition,
    )
    from fluster_bus.messages.requests import (
        Done,
        ExplainReply,
        ExplainRequest,
        FlushRequest,
        ListReply,
        ListRequest,
        NamespaceReply,
        NamespaceRequest,
        OwnerReply,
        OwnerRequest,
        StatusReply,
        StatusRequest,
        TerminateReply,
        TerminateRequest,
    )
    from fluster_bus.messages.worker_service import (
        AttemptList,
        AttemptLogsReply,
        AttemptLogsRequest,
        AttemptQuery,
        AttemptsFlushRequest,
        AttemptStatus,
        DrainReply,
        DrainRequest,
        KillAttemptRequest,
        RunReply,
        RunRequest,
        WorkerHealth,
    )
    from fluster_bus.messages.workers import (
        Capacity,
        Heartbeat,
        HeartbeatReply,
        Offer,
        OfferReply,
        ProgressReport,
        RecordChanged,
        VMTrouble,
        WorkerInfo,
        WorkerList,
        WorkerStatus,
    )

__all__ = [
    "TPU_TOPOLOGIES",
    "ActorSeat",
    "AttemptList",
    "AttemptLogsReply",
    "AttemptLogsRequest",
    "AttemptQuery",
    "AttemptStatus",
    "AttemptsFlushRequest",
    "Capacity",
    "CpuConfig",
    "Done",
    "DrainReply",
    "DrainRequest",
    "Endpoint",
    "EndpointId",
    "EndpointList",
    "EndpointQuery",
    "Entrypoint",
    "EnvironmentConfig",
    "Event",
    "ExplainReply",
    "ExplainRequest",
    "Fence",
    "FlushRequest",
    "GpuConfig",
    "HandledCalls",
    "Heartbeat",
    "HeartbeatReply",
    "JobDetails",
    "JobId",
    "JobInfo",
    "JobRecord",
    "JobRequest",
    "JobStatus",
    "KeptAnswer",
    "KillAttemptRequest",
    "Leader",
    "ListReply",
    "ListRequest",
    "LogBatch",
    "LogLine",
    "Message",
    "Namespace",
    "NamespaceQuota",
    "NamespaceRecord",
    "NamespaceReply",
    "NamespaceRequest",
    "NamespaceState",
    "Offer",
    "OfferReply",
    "OwnerReply",
    "OwnerRequest",
    "Progress",
    "ProgressReport",
    "RecordChanged",
    "RefusedJob",
    "Replacement",
    "ResourceConfig",
    "RunReply",
    "RunRequest",
    "SavedState",
    "StatusReply",
    "StatusRequest",
    "TaskError",
    "TaskRecord",
    "TaskResult",
    "TaskStatus",
    "TerminateReply",
    "TerminateRequest",
    "TpuConfig",
    "TpuTopologyInfo",
    "Transition",
    "TrimCalls",
    "UnregisterRequest",
    "UsedImage",
    "VMTrouble",
    "WorkerHealth",
    "WorkerId",
    "WorkerInfo",
    "WorkerList",
    "WorkerStatus",
    "create_environment",
    "parse_size",
    "tpu_topology",
]

_SOURCES = (  # those first that a client needs; each imports what the ones before it have
    "fluster_bus.core.names",
    "fluster_bus.messages.parts.model",
    "fluster_bus.messages.endpoints",
    "fluster_bus.messages.logs",
    "fluster_bus.messages.parts.environments",
    "fluster_bus.messages.parts.images",
    "fluster_bus.messages.parts.resources",
    "fluster_bus.messages.parts.tpu",
    "fluster_bus.messages.jobs",
    "fluster_bus.messages.records",
    "fluster_bus.messages.requests",
    "fluster_bus.messages.namespaces",
    "fluster_bus.messages.workers",
    "fluster_bus.messages.worker_service",
)

# Found when asked for: a client needs half of them, and to import the others takes as long as all else that it does.
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, __all__, _SOURCES)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
