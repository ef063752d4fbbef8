"""What a job was asked to run, as words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fluster.cli.output import size

if TYPE_CHECKING:
    from fluster_bus.messages import EnvironmentConfig, JobInfo, ResourceConfig

_MAX_COMMAND = 60  # characters


def shown_details(info: JobInfo) -> tuple[str, str, str]:
    """Its resources, its command, and its environment; `-` for what a controller of an earlier version does not tell."""
    details = info.details
    if details is None:
        return "-", "-", "-"
    command = "(a callable)" if details.command is None else shlex.join(details.command)
    if len(command) > _MAX_COMMAND:
        command = command[: _MAX_COMMAND - 1] + "…"
    return _resources(details.resources), command, _environment(details.environment) or "-"


def _resources(resources: ResourceConfig) -> str:
    from fluster_bus.messages.counted import number_text

    device = resources.device
    words = [f"{resources.cpu:g} CPU", size(resources.memory)]
    if device.kind != "cpu":
        words.append(f"{device.count} x {device.variant} {device.kind.upper()}")
    if resources.disk:
        words.append(f"{size(resources.disk)} of disk")
    words += [f"{number_text(count)} {name}" for name, count in sorted(resources.resources.items())]
    words += [f"{name}={value}" for name, value in sorted(resources.labels.items())]
    return ", ".join(words)


def _environment(environment: EnvironmentConfig) -> str:
    variables = [f"{name}={value}" for name, value in sorted(environment.env_vars.items())]
    secrets = [f"{name}=***" for name in environment.secrets if name not in environment.env_vars]
    return " ".join([*variables, *secrets])
