"""What a job was asked to run, as words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fluster.cli.common.output import size

if TYPE_CHECKING:
    from fluster_bus.messages import EnvironmentConfig, JobInfo, ResourceConfig

_SHOWN_HASH = 12  # hexadecimal digits


def shown_details(info: JobInfo) -> tuple[str, str, str, str]:
    """Its resources, command, variables and the rest of its environment; `-` for what an earlier controller does not
    tell.
    """
    details = info.details
    if details is None:
        return "-", "-", "-", "-"
    command = "(a callable)" if details.command is None else shlex.join(details.command)
    return (
        _resources(details.resources),
        command,
        _variables(details.environment) or "-",
        _environment(details.environment) or "-",
    )


def _resources(resources: ResourceConfig) -> str:
    from fluster_bus.messages.parts.counted import number_text

    device = resources.device
    words = [f"{resources.cpu:g} CPU", size(resources.memory)]
    if device.kind != "cpu":
        words.append(f"{device.count} x {device.variant} {device.kind.upper()}")
    if resources.disk:
        words.append(f"{size(resources.disk)} of disk")
    words += [f"{number_text(count)} {name}" for name, count in sorted(resources.resources.items())]
    words += [f"{name}={value}" for name, value in sorted(resources.labels.items())]
    return ", ".join(words)


def _variables(environment: EnvironmentConfig) -> str:
    variables = [f"{name}={value}" for name, value in sorted(environment.env_vars.items())]
    secrets = [f"{name}=***" for name in environment.secrets if name not in environment.env_vars]
    return " ".join([*variables, *secrets])


def _environment(environment: EnvironmentConfig) -> str:
    words = [
        # A path of the client says nothing elsewhere; what was packed is named by its hash.
        ("workspace", environment.bundle and environment.bundle[:_SHOWN_HASH]),
        ("cwd", environment.cwd),
        ("python", environment.python),
        ("image", environment.image),
        ("packages", ", ".join(environment.pip_packages)),
        ("requirements", environment.requirements and f"of {len(environment.requirements.splitlines())} lines"),
        ("packages", environment.uv_lock and "of uv.lock"),
        ("mounts", ", ".join(f"{source} at {path}" for path, source in environment.mounts.items())),
    ]
    return "; ".join(f"{name} {value}" for name, value in words if value)
