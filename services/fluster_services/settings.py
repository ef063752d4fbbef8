"""What a deployed daemon reads from its environment about time and room: each setting once, for the controller and the worker."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from fluster.local_setup import OPTIONS_VARIABLE
from fluster_bus.core.errors import FlusterError
from fluster_bus.core.names import near
from fluster_bus.core.stream_bounds import NamespaceBounds
from fluster_bus.messages import parse_size
from fluster_bus.storage.replication import REPLICAS_SETTING, Replication
from fluster_services.config import (
    CacheLimits,
    DaemonLogs,
    DiskLimits,
    LocalLimits,
    LogLimits,
    ProportionError,
    RecordLimits,
    TaskLimits,
    Timing,
    WorkerLimits,
)

Group = TypeVar(
    "Group",
    Timing,
    RecordLimits,
    NamespaceBounds,
    Replication,
    CacheLimits,
    LogLimits,
    TaskLimits,
    DiskLimits,
    DaemonLogs,
)


_PREFIX = "FLUSTER_"
_USAGE = 2  # the exit code of `fluster` for what was typed wrong


class SettingError(FlusterError):
    """A variable of the environment has a value that cannot be used."""


class Setting(NamedTuple):
    """One variable, the field that it sets, and how its text is read."""

    variable: str
    field: str
    parse: Callable[[str], Any]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time: give seconds, such as 60") from None


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number: give one such as 1000") from None


SETTINGS: Mapping[type[object], Sequence[Setting]] = {
    Timing: [Setting(f"FLUSTER_{each.name.upper()}", each.name, _seconds) for each in dataclasses.fields(Timing)],
    RecordLimits: [
        Setting("FLUSTER_RECORDS_KEPT_S", "kept_s", _seconds),
        Setting("FLUSTER_RECORDS_KEPT_AT_LEAST_S", "kept_at_least_s", _seconds),
        Setting("FLUSTER_RECORDS_SURE_AFTER_S", "sure_after_s", _seconds),
        Setting("FLUSTER_MAX_RECORDS", "max_finished", _count),
        Setting("FLUSTER_SECRETS_SWEEP_S", "secrets_sweep_s", _seconds),
        Setting("FLUSTER_SECRETS_ORPHANED_S", "secrets_orphaned_s", _seconds),
    ],
    NamespaceBounds: [
        Setting("FLUSTER_NAMESPACE_BUDGET", "budget_bytes", parse_size),
        Setting("FLUSTER_LOGS_BUDGET", "logs_bytes", parse_size),
        Setting("FLUSTER_EVENTS_BUDGET", "events_bytes", parse_size),
        Setting("FLUSTER_RESULTS_BUDGET", "results_bytes", parse_size),
        Setting("FLUSTER_CALLS_BUDGET", "calls_bytes", parse_size),
        Setting("FLUSTER_HISTORY_KEPT_S", "history_kept_s", _seconds),
        Setting("FLUSTER_RESULTS_KEPT_S", "results_kept_s", _seconds),
        Setting("FLUSTER_CALLS_KEPT_S", "calls_kept_s", _seconds),
        Setting("FLUSTER_MAX_CALLS_PER_ACTOR", "max_calls_of_actor", _count),
        Setting("FLUSTER_MAX_CALL", "max_call_bytes", parse_size),
        Setting("FLUSTER_SECRETS_KEPT_S", "secrets_kept_s", _seconds),
        Setting("FLUSTER_MAX_SECRETS", "max_secrets", _count),
        Setting("FLUSTER_WORKSPACES_KEPT_S", "workspaces_kept_s", _seconds),
        Setting("FLUSTER_PAYLOADS_KEPT_S", "payloads_kept_s", _seconds),
        Setting("FLUSTER_REQUESTS_KEPT_S", "requests_kept_s", _seconds),
    ],
    Replication: [Setting(REPLICAS_SETTING, "replicas", _count)],
    CacheLimits: [
        Setting("FLUSTER_WORKSPACES_CACHE", "workspaces_bytes", parse_size),
        Setting("FLUSTER_ENVIRONMENTS_CACHE", "environments_bytes", parse_size),
    ],
    LogLimits: [
        Setting("FLUSTER_MAX_LOG", "stream_bytes", parse_size),
        Setting("FLUSTER_MAX_LOG_LINE", "line_bytes", parse_size),
    ],
    TaskLimits: [Setting("FLUSTER_MAX_PROCESSES", "max_processes", _count)],
    DiskLimits: [Setting("FLUSTER_LEAST_FREE_DISK", "least_free_bytes", parse_size)],
}

# Of a cluster on one machine alone: other daemons write to their standard error.
_LOCAL_SETTINGS: Mapping[type[object], Sequence[Setting]] = {
    DaemonLogs: [Setting("FLUSTER_DAEMON_LOG", "file_bytes", parse_size)]
}

_NO_LIMITS = (Timing, Replication)  # a cluster on one machine has one server


@contextmanager
def refusing(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """End the process with one line for a SettingError: of an option, if the setting was given as one of `fluster`."""
    options: dict[str, str] = json.loads(environment.pop(OPTIONS_VARIABLE, "{}"))
    try:
        yield
    except SettingError as error:
        text = re.sub(r"\w+", lambda word: options.get(word[0], word[0]), str(error))
        if text == str(error):
            sys.exit(text)
        sys.stderr.write(f"fluster: {text}\n")
        sys.exit(_USAGE)


def read_settings(group: type[Group], environment: Mapping[str, str] = os.environ) -> Group:
    """Return a group of settings: its defaults, and what the environment says. Raises SettingError."""
    settings, known = {**SETTINGS, **_LOCAL_SETTINGS}[group], {}
    for setting in settings:
        text = environment.get(setting.variable)
        if text:
            try:
                known[setting.field] = setting.parse(text)
            except ValueError as error:
                raise SettingError(f"{setting.variable}: {error}") from error
    try:
        return group(**known)
    except ProportionError as error:
        raise SettingError(_with_variables(error.naming(known), settings)) from error
    except ValueError as error:
        raise SettingError(_with_variables(str(error), settings)) from error


def read_worker_limits(environment: Mapping[str, str] = os.environ) -> WorkerLimits:
    """Return all limits of a worker. Raises SettingError."""
    return WorkerLimits(
        caches=read_settings(CacheLimits, environment),
        logs=read_settings(LogLimits, environment),
        tasks=read_settings(TaskLimits, environment),
        disk=read_settings(DiskLimits, environment),
    )


def read_local_limits(given: Mapping[str, str]) -> LocalLimits:
    """Return the limits that are given by the names of their variables, without FLUSTER_ and in lower case. Raises SettingError."""
    known = {_local_name(each.variable) for group, each in _all_settings() if group not in _NO_LIMITS}
    for name in given:
        if name not in known:
            raise SettingError(f"limits: {name!r} is not known{near(name, sorted(known))}")
    environment = {f"{_PREFIX}{name.upper()}": text for name, text in given.items()}
    try:
        return LocalLimits(
            read_settings(RecordLimits, environment),
            read_settings(NamespaceBounds, environment),
            read_worker_limits(environment),
            read_settings(DaemonLogs, environment),
        )
    except SettingError as error:
        text = re.sub(rf"{_PREFIX}\w+", lambda variable: _local_name(variable[0]), str(error))
        raise SettingError(f"limits: {text}") from error


def _all_settings() -> Iterator[tuple[type[object], Setting]]:
    for group, settings in {**SETTINGS, **_LOCAL_SETTINGS}.items():
        for setting in settings:
            yield group, setting


def _local_name(variable: str) -> str:
    return variable.removeprefix(_PREFIX).lower()


def _with_variables(text: str, settings: Sequence[Setting]) -> str:
    """The text with each field called as its reader has set it."""
    variables = {setting.field: setting.variable for setting in settings}
    return re.sub(r"\w+", lambda word: variables.get(word[0], word[0]), text)
