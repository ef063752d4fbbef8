"""What programs may hold and pass to jobs and actors stays in its module: a pickle names it, and older programs read pickles."""

from __future__ import annotations

import importlib

import pytest

_HELD = {  # {module of fluster_bus.messages: what users get from there, directly or as a part of something}
    "endpoints": ("Endpoint",),
    "jobs": (
        "Entrypoint",
        "JobDetails",
        "JobInfo",
        "JobRequest",
        "JobStatus",
        "Progress",
        "TaskError",
        "TaskResult",
        "TaskStatus",
    ),
    "logs": ("LogLine",),
    "namespaces": ("NamespaceChange", "NamespaceQuota", "NamespaceRecord", "NamespaceState", "NamespaceStatus"),
    "nodes": ("NodeGpu", "NodeInfo", "NodeStatus"),
    "stacks": ("JobStack", "ProcessStack", "StackFrame", "TaskStack", "ThreadStack"),
    "worker_service": ("DrainReply", "WorkerHealth"),
    "workers": ("Capacity", "WorkerInfo", "WorkerStatus"),
    "parts.arrays": ("TaskArray",),
    "parts.environments": ("EnvironmentConfig", "create_environment"),
    "parts.images": ("UsedImage",),
    "parts.model": ("Message",),
    "parts.origin": ("Origin",),
    "parts.resources": ("CpuConfig", "GpuConfig", "ResourceConfig", "TpuConfig", "parse_size"),
    "parts.tpu": ("TpuTopologyInfo", "tpu_topology"),
    "parts.wire_range": ("WireRange",),
}


@pytest.mark.parametrize(("module", "names"), _HELD.items())
def test_what_users_hold_stays_in_its_module(module: str, names: tuple[str, ...]) -> None:
    path = f"fluster_bus.messages.{module}"
    found = importlib.import_module(path)
    assert {name: getattr(found, name).__module__ for name in names} == dict.fromkeys(names, path)
