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
from fluster_bus.errors import FlusterError
from fluster_bus.messages import parse_size
from fluster_bus.stream_bounds import NamespaceBounds
from fluster_services.config import CacheLimits, LogLimits, RecordLimits, Timing

Group = TypeVar("Group", Timing, RecordLimits, NamespaceBounds, CacheLimits, LogLimits)


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


SETTINGS: Mapping[type[Any], Sequence[Setting]] = {
    Timing: [Setting(f"FLUSTER_{each.name.upper()}", each.name, _seconds) for each in dataclasses.fields(Timing)],
    RecordLimits: [
        Setting("FLUSTER_RECORDS_KEPT_S", "kept_s", _seconds),
        Setting("FLUSTER_RECORDS_KEPT_AT_LEAST_S", "kept_at_least_s", _seconds),
        Setting("FLUSTER_RECORDS_SURE_AFTER_S", "sure_after_s", _seconds),
        Setting("FLUSTER_MAX_RECORDS", "max_finished", _count),
    ],
    NamespaceBounds: [
        Setting("FLUSTER_LOGS_BUDGET", "logs_bytes", parse_size),
        Setting("FLUSTER_EVENTS_BUDGET", "events_bytes", parse_size),
        Setting("FLUSTER_RESULTS_BUDGET", "results_bytes", parse_size),
        Setting("FLUSTER_CALLS_BUDGET", "calls_bytes", parse_size),
        Setting("FLUSTER_HISTORY_KEPT_S", "history_kept_s", _seconds),
        Setting("FLUSTER_RESULTS_KEPT_S", "results_kept_s", _seconds),
        Setting("FLUSTER_CALLS_KEPT_S", "calls_kept_s", _seconds),
    ],
    CacheLimits: [
        Setting("FLUSTER_WORKSPACES_CACHE", "workspaces_bytes", parse_size),
        Setting("FLUSTER_ENVIRONMENTS_CACHE", "environments_bytes", parse_size),
    ],
    LogLimits: [
        Setting("FLUSTER_MAX_LOG", "stream_bytes", parse_size),
        Setting("FLUSTER_MAX_LOG_LINE", "line_bytes", parse_size),
    ],
}


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
    settings, known = SETTINGS[group], {}
    for setting in settings:
        text = environment.get(setting.variable)
        if text:
            try:
                known[setting.field] = setting.parse(text)
            except ValueError as error:
                raise SettingError(f"{setting.variable}: {error}") from error
    try:
        return group(**known)
    except ValueError as error:
        raise SettingError(_with_variables(str(error), settings)) from error


def _with_variables(text: str, settings: Sequence[Setting]) -> str:
    """The text with each field called as whoever reads it has set it."""
    variables = {setting.field: setting.variable for setting in settings}
    return re.sub(r"\w+", lambda word: variables.get(word[0], word[0]), text)
