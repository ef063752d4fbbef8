"""What the environment says to deployed daemons about time and room."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from fluster.cli.daemons import CONTROLLER_SETTINGS, WORKER_SETTINGS
from fluster_bus.core.stream_bounds import NamespaceBounds
from fluster_bus.storage.replication import Replication
from fluster_services.config import CacheLimits, DiskLimits, LogLimits, RecordLimits, TaskLimits, Timing
from fluster_services.controller.__main__ import _config_from_environment
from fluster_services.settings import SETTINGS, SettingError, read_settings
from fluster_services.worker.__main__ import _overrides


@pytest.mark.parametrize(
    "group", [Timing, RecordLimits, NamespaceBounds, Replication, CacheLimits, LogLimits, TaskLimits, DiskLimits]
)
def test_what_is_not_said_is_the_default(group: type[Any]) -> None:
    assert read_settings(group, dict.fromkeys((each.variable for each in SETTINGS[group]), "")) == group()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"FLUSTER_FENCE_AFTER_S": "300", "FLUSTER_WORKER_TIMEOUT_S": "400", "FLUSTER_KILL_GRACE_S": "60.5"},
            Timing(fence_after_s=300, worker_timeout_s=400, kill_grace_s=60.5),
        ),
        ({"FLUSTER_HEARTBEAT_S": "1", "FLUSTER_LEADER_LEASE_S": "3"}, Timing(heartbeat_s=1, leader_lease_s=3)),
        (
            {"FLUSTER_UNSCHEDULABLE_AFTER_S": "5", "FLUSTER_HOLD_S": "6", "FLUSTER_UNFIT_RETRY_S": "7"},
            Timing(unschedulable_after_s=5, hold_s=6, unfit_retry_s=7),
        ),
        (
            {
                "FLUSTER_RECORDS_KEPT_S": "3600",
                "FLUSTER_MAX_RECORDS": "100",
                "FLUSTER_RECORDS_KEPT_AT_LEAST_S": "0",
                "FLUSTER_SECRETS_SWEEP_S": "5",
                "FLUSTER_SECRETS_ORPHANED_S": "0",
            },
            RecordLimits(kept_s=3600, max_finished=100, kept_at_least_s=0, secrets_sweep_s=5, secrets_orphaned_s=0),
        ),
        (
            {
                "FLUSTER_LOGS_BUDGET": "2GiB",
                "FLUSTER_EVENTS_BUDGET": "64MiB",
                "FLUSTER_RESULTS_BUDGET": "1TB",
                "FLUSTER_CALLS_BUDGET": "1GiB",
                "FLUSTER_HISTORY_KEPT_S": "3600",
                "FLUSTER_RESULTS_KEPT_S": "7200",
                "FLUSTER_CALLS_KEPT_S": "120",
                "FLUSTER_MAX_CALLS_PER_ACTOR": "5",
                "FLUSTER_MAX_CALL": "8MiB",
                "FLUSTER_WORKSPACES_KEPT_S": "1e6",
                "FLUSTER_PAYLOADS_KEPT_S": "86400",
                "FLUSTER_SECRETS_KEPT_S": "120",
                "FLUSTER_MAX_SECRETS": "1",
            },
            NamespaceBounds(
                logs_bytes=2 << 30,
                events_bytes=64 << 20,
                results_bytes=10**12,
                calls_bytes=1 << 30,
                history_kept_s=3600,
                results_kept_s=7200,
                calls_kept_s=120,
                max_calls_of_actor=5,
                max_call_bytes=8 << 20,
                workspaces_kept_s=1e6,
                payloads_kept_s=86_400,
                secrets_kept_s=120,
                max_secrets=1,
            ),
        ),
        (
            {"FLUSTER_WORKSPACES_CACHE": "1GiB", "FLUSTER_ENVIRONMENTS_CACHE": "0"},
            CacheLimits(workspaces_bytes=1 << 30, environments_bytes=0),
        ),
        (
            {"FLUSTER_MAX_LOG": "1MiB", "FLUSTER_MAX_LOG_LINE": "1KiB"},
            LogLimits(stream_bytes=1 << 20, line_bytes=1 << 10),
        ),
    ],
)
def test_what_is_said_is_taken(environment: Mapping[str, str], expected: Any) -> None:
    assert read_settings(type(expected), environment) == expected


@pytest.mark.parametrize(
    ("group", "environment", "text"),
    [
        (
            Timing,
            {"FLUSTER_HEARTBEAT_S": "soon"},
            "FLUSTER_HEARTBEAT_S: 'soon' is not a time: give seconds, such as 60",
        ),
        (Timing, {"FLUSTER_KILL_GRACE_S": "-1"}, r"FLUSTER_KILL_GRACE_S=-1.0: give a number of seconds above 0"),
        (Timing, {"FLUSTER_HOLD_S": "nan"}, "FLUSTER_HOLD_S=nan"),
        (
            Timing,
            {"FLUSTER_FENCE_AFTER_S": "300"},
            "^FLUSTER_FENCE_AFTER_S=300: with .* it makes 315, .* FLUSTER_WORKER_TIMEOUT_S=120, .* raise FLUSTER_WORKER_TIMEOUT_S",
        ),
        (Timing, {"FLUSTER_ENDPOINT_LEASE_S": "0.5"}, "FLUSTER_ENDPOINT_LEASE_S=0.5: give a number of seconds from 1"),
        (Timing, {"FLUSTER_SEAT_LEASE_S": "0.5"}, "FLUSTER_SEAT_LEASE_S=0.5: give a number of seconds from 1 to 3600"),
        (Timing, {"FLUSTER_SEAT_LEASE_S": "1e6"}, "FLUSTER_SEAT_LEASE_S=1000000.0: give a number of seconds from 1"),
        (RecordLimits, {"FLUSTER_MAX_RECORDS": "0"}, "FLUSTER_MAX_RECORDS=0: give a number above 0"),
        (RecordLimits, {"FLUSTER_MAX_RECORDS": "1e3"}, "FLUSTER_MAX_RECORDS: '1e3' is not a number"),
        (RecordLimits, {"FLUSTER_RECORDS_KEPT_S": "inf"}, "FLUSTER_RECORDS_KEPT_S=inf"),
        (
            NamespaceBounds,
            {"FLUSTER_LOGS_BUDGET": "1MB"},
            "FLUSTER_LOGS_BUDGET=1000000: give a size from 64 MiB to 1 PiB",
        ),
        (NamespaceBounds, {"FLUSTER_RESULTS_BUDGET": "2000TB"}, "FLUSTER_RESULTS_BUDGET=2000000000000000: give a size"),
        (
            NamespaceBounds,
            {"FLUSTER_HISTORY_KEPT_S": "60"},
            "FLUSTER_HISTORY_KEPT_S=60.0: give a number of seconds from 120",
        ),
        (NamespaceBounds, {"FLUSTER_HISTORY_KEPT_S": "nan"}, "FLUSTER_HISTORY_KEPT_S=nan"),
        (NamespaceBounds, {"FLUSTER_MAX_CALLS_PER_ACTOR": "0"}, "FLUSTER_MAX_CALLS_PER_ACTOR=0: give a number from 1"),
        (NamespaceBounds, {"FLUSTER_MAX_CALL": "9MiB"}, "FLUSTER_MAX_CALL=9437184: give a size from 4 KiB to 8 MiB"),
        (
            NamespaceBounds,
            {"FLUSTER_PAYLOADS_KEPT_S": "60"},
            "FLUSTER_PAYLOADS_KEPT_S=60.0: give a number of seconds from 14400",
        ),
        (
            RecordLimits,
            {"FLUSTER_SECRETS_SWEEP_S": "0"},
            "FLUSTER_SECRETS_SWEEP_S=0.0: give a number of seconds above 0",
        ),
        (CacheLimits, {"FLUSTER_WORKSPACES_CACHE": "much"}, "FLUSTER_WORKSPACES_CACHE: invalid size 'much'"),
        (TaskLimits, {"FLUSTER_MAX_PROCESSES": "1"}, "FLUSTER_MAX_PROCESSES=1: give a number from 16 to 4194304"),
        (DiskLimits, {"FLUSTER_LEAST_FREE_DISK": "0"}, "FLUSTER_LEAST_FREE_DISK=0: give a size from 1 MiB to 1 PiB"),
        (Replication, {"FLUSTER_REPLICAS": "2"}, "FLUSTER_REPLICAS=2: give 1, or 3 where the servers are 3 or more"),
        (LogLimits, {"FLUSTER_MAX_LOG_LINE": "8MB"}, "FLUSTER_MAX_LOG_LINE=8000000: give a size from 1 KiB to 128 KiB"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_variable(
    group: type[Any], environment: Mapping[str, str], text: str
) -> None:
    with pytest.raises(SettingError, match=text):
        read_settings(group, environment)


def test_every_setting_is_an_option() -> None:
    options = {each.variable for each in (*CONTROLLER_SETTINGS, *WORKER_SETTINGS)}
    assert {each.variable for settings in SETTINGS.values() for each in settings} <= options


def test_a_controller_goes_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_CLUSTER_ADDRESS", "nats://service:secret@127.0.0.1:4222")
    monkeypatch.setenv("FLUSTER_WORKER_TIMEOUT_S", "200")
    monkeypatch.setenv("FLUSTER_MAX_RECORDS", "10")
    monkeypatch.setenv("FLUSTER_LOGS_BUDGET", "2GiB")
    monkeypatch.setenv("FLUSTER_REPLICAS", "3")
    config = _config_from_environment()
    assert config.replication == Replication(3)
    assert config.bounds == NamespaceBounds(logs_bytes=2 << 30)
    assert (config.timing, config.records) == (Timing(worker_timeout_s=200), RecordLimits(max_finished=10))


def test_a_worker_is_told_how_many_tasks_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_MAX_CONCURRENT_JOBS", "3")
    assert _overrides().tasks == 3
    monkeypatch.setenv("FLUSTER_MAX_CONCURRENT_JOBS", "")
    assert _overrides().tasks is None
    for nonsense in ("0", "-1", "some"):
        monkeypatch.setenv("FLUSTER_MAX_CONCURRENT_JOBS", nonsense)
        with pytest.raises(SettingError, match=f"FLUSTER_MAX_CONCURRENT_JOBS: '{nonsense}' is not a number of tasks"):
            _overrides()


@pytest.mark.parametrize("daemon", ["controller", "worker"])
def test_a_daemon_that_is_told_nonsense_ends_with_one_line(daemon: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLUSTER_CLUSTER_ADDRESS": "nats://service:secret@127.0.0.1:1",
        "FLUSTER_JOB_DEFAULT_PASSWORD": "secret",
        "FLUSTER_FENCE_AFTER_S": "300",
    }
    ended = subprocess.run(
        [sys.executable, "-m", f"fluster_services.{daemon}"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("FLUSTER_FENCE_AFTER_S=300: with FLUSTER_KILL_GRACE_S=10 and")
