"""What fray asks for, in Fluster's words. What Fluster cannot give is refused here, before anything is launched."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping

from fray import types as fray

from fluster.integrations.fray.versions import ANY_REGION, in_full
from fluster_bus.core.names import MAX_NAME_LENGTH
from fluster_bus.messages import (
    CpuConfig,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobRequest,
    ResourceConfig,
    TpuConfig,
    parse_size,
)

_DIGEST_CHARACTERS = 8
# fray's bands, of which the lower is the more urgent: system 4, production 1, interactive 2 (or none, 0), batch 3.
_PRIORITIES = {4: 20, 1: 10, 2: 0, 0: 0, 3: -10}
_ANY_GPU = "auto"


def name_of(name: str, within: str = "") -> str:
    """The name as Fluster can have it. Of two that differ, or are used within different jobs, no two come out the
    same.
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name) or "job"
    if plain == name and not within and len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(f"{within}/{name}".encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{plain[: MAX_NAME_LENGTH - _DIGEST_CHARACTERS - 1]}-{digest}"


def job_of(asked: fray.JobRequest, run: Callable[..., None], default: EnvironmentConfig) -> JobRequest:
    """The job that a request asks for; `run(callable, args, kwargs, default)` is what a callable is run by.

    Raises NotImplementedError for what Fluster does not have, TypeError and ValueError.
    """
    request = in_full(asked)
    _refuse("JobRequest", processes_per_task=request.processes_per_task if request.processes_per_task != 1 else None)
    replicas = request.replicas or 1
    gang = is_slice(request.resources, replicas) or (
        replicas > 1 and isinstance(request.resources.device, fray.GpuConfig)
    )
    return JobRequest(
        name=name_of(request.name),
        entrypoint=_entrypoint_of(request.entrypoint, run, default),
        resources=resources_of(request.resources),
        environment=environment_of(request.environment, request.resources, default),
        replicas=replicas,
        gang=gang,
        max_retries_failure=request.max_retries_failure,
        max_retries_preemption=request.max_retries_preemption,
        max_task_failures=0 if gang else request.max_task_failures,
        timeout_s=None if request.timeout is None else request.timeout.to_seconds(),
        priority=priority_of(request.priority),
    )


def _entrypoint_of(entrypoint: fray.Entrypoint, run: Callable[..., None], default: EnvironmentConfig) -> Entrypoint:
    if (called := entrypoint.callable_entrypoint) is not None:
        return Entrypoint(callable=run, args=(called.callable, tuple(called.args), dict(called.kwargs), default))
    if (binary := entrypoint.binary_entrypoint) is not None:
        return Entrypoint(command=(binary.command, *binary.args))
    raise ValueError("the JobRequest's entrypoint has neither a callable nor a binary")


def resources_of(resources: fray.ResourceConfig) -> ResourceConfig:
    """Raises NotImplementedError and ValueError.

    What says where, as region and zone do, is asked for as labels of workers. `preemptible` asks for nothing, since
    Fluster does not know which machines are; nor does a disk of the size that all have who name none.
    """
    asked = in_full(resources)
    _refuse(
        "ResourceConfig",
        target_cluster=asked.target_cluster,
        device_alternatives=asked.device_alternatives,
        container_profile=asked.container_profile,
        regions=asked.regions if asked.regions and len(asked.regions) > 1 else None,
    )
    labels = {} if asked.zone is None else {"zone": asked.zone}
    if asked.regions and asked.regions[0] != ANY_REGION:
        labels["region"] = asked.regions[0]
    return ResourceConfig(
        cpu=asked.cpu,
        memory=parse_size(asked.ram),
        disk=0 if asked.disk == fray.ResourceConfig().disk else parse_size(asked.disk),
        device=_device_of(asked.device),
        labels=labels,
    )


def _device_of(device: fray.DeviceConfig) -> CpuConfig | GpuConfig | TpuConfig:
    if isinstance(device, fray.GpuConfig):
        return GpuConfig(variant="any" if device.variant == _ANY_GPU else device.variant, count=device.count)
    if isinstance(device, fray.TpuConfig):
        return TpuConfig(variant=device.variant)
    return CpuConfig()


def is_slice(asked: fray.ResourceConfig, replicas: int) -> bool:
    """Whether the tasks are the machines of one TPU slice, which start together."""
    return replicas > 1 and isinstance(asked.device, fray.TpuConfig) and asked.device.vm_count() > 1


def environment_of(
    environment: fray.EnvironmentConfig | None, resources: fray.ResourceConfig, default: EnvironmentConfig
) -> EnvironmentConfig:
    """What is asked for, else the default, and what its device wants. Raises NotImplementedError and ValueError."""
    variables: Mapping[str, str] = resources.device.default_env_vars()
    if environment is None:
        image = resources.image or default.image
        return default.model_copy(update={"env_vars": {**variables, **default.env_vars}, "image": image})
    asked = in_full(environment)
    _refuse(
        "EnvironmentConfig",
        secrets=asked.secrets,
        extras=asked.extras,
        setup_scripts=asked.setup_scripts,
        sync_packages=asked.sync_packages,
    )
    return EnvironmentConfig(
        workspace=asked.workspace,
        pip_packages=tuple(asked.pip_packages),
        env_vars={**variables, **asked.env_vars},
        image=resources.image or asked.docker_image,
    )


def priority_of(band: int) -> int:
    """Raises ValueError."""
    if band not in _PRIORITIES:
        raise ValueError(f"priority={band!r}: fray's bands are {', '.join(map(str, sorted(_PRIORITIES)))}")
    return _PRIORITIES[band]


def _refuse(kind: str, **values: object) -> None:
    """The values stay untold, as there are secrets among them, but for what is plain."""
    given = [f"{name}={value!r}" if isinstance(value, int | str) else name for name, value in values.items() if value]
    if given:
        raise NotImplementedError(f"{kind}({', '.join(given)}): Fluster does not have that: leave it out")
