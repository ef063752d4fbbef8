"""What is wrong with an option is said in one line, which names the option, quotes the value and tells the remedy, with exit code 2."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import typer

from fluster.cli.app import main
from fluster_services.controller.__main__ import main as controller
from fluster_services.worker.__main__ import main as worker

_BAD_NUMBERS = ("-1", "foo", "1e+30", "nan", "")
_BAD_SIZES = ("-1", "foo", "nan", "9" * 30, "")

SUBMIT = {
    "--cpu": _BAD_NUMBERS,
    "--memory": _BAD_SIZES,
    "--disk": _BAD_SIZES,
    "--gpu": ("0", "-1", "h100:0", "a b", ""),
    "--label": ("0", "foo", ""),
    "--resource": ("0", "-1", "foo", "license=-1", "license=nan", "license=foo", ""),
    "--replicas": ("0", "-1", "foo", "1e30", "9" * 30, ""),
    "--retries": ("-1", "foo", ""),
    "--max-task-failures": ("-1", "foo", ""),
    "--timeout": ("0", "-1", "foo", "1e30", "nan", "inf", ""),
    "--scheduling-timeout": ("0", "-1", "foo", "1e30", "nan", "inf", ""),
    "--priority": ("foo", "99999", ""),
    "--array": ("foo", "-1", "5-2", "0-99999999", "nan", ""),
    "--python": ("-1", ""),
    "--name": ("a b", ""),
    "--job-id": ("a b", ""),
    "--ports": ("a b", ""),
    "--secret": ("FLUSTER_NOT_SET", ""),
    "--env": ("foo", ""),
    "--image": ("-1", ""),
    "--on": ("a b", ""),
    "--after": ("",),
    "--pip": ("",),
    "--cwd": ("",),
    "--workspace": ("/no/such/folder",),
    "--requirements": ("/no/such/file",),
    "--env-file": ("/no/such/file",),
    "--on-conflict": ("foo", ""),
}
UP = {
    "--workers": ("0", "-1", "foo", "1e30", ""),
    "--cpu": ("0", *_BAD_NUMBERS),
    "--memory": ("0", *_BAD_SIZES),
    "--disk": _BAD_SIZES,
    "--gpus": ("-1", "a b", "h100:0", ""),
    "--label": ("foo", ""),
    "--resource": ("foo", "license=0", "license=nan", ""),
    "--namespace": ("a.b", "sys", ""),
    "--port": ("-1", "foo", "99999", ""),
    "--runtime": ("foo", ""),
    "--timing": ("foo", "hold_s=foo", "hold_s=-1", "fence_after_s=", "kill_grace_s=1000", ""),
    "--limit": ("foo", "max_log=", "max_log_line=0", ""),
}
NAMESPACE = {
    "--cpus": _BAD_NUMBERS,
    "--gpus": ("-1", "1.5", "foo", ""),
    "--memory": _BAD_SIZES,
    "--waiting-jobs": ("-1", "foo", ""),
    "--max-priority": ("1001", "foo", ""),
    "--weight": ("0", "-1", "foo", "nan", "inf", ""),
}
_SECONDS = ("0", "-1", "foo", "nan", "inf", "")
CONTROLLER = {
    "--fence-after": (*_SECONDS, "1000"),
    "--kill-grace": (*_SECONDS, "1000"),
    "--worker-timeout": (*_SECONDS, "100"),
    "--seat-lease": (*_SECONDS, "1e+30"),
    "--max-records": ("0", "-1", "foo", ""),
    "--logs-budget": ("0", "-1", "foo", "2000000000000000", ""),
    "--results-kept": ("0", "-1", "foo", "nan", ""),
}
WORKER = {
    "--cpus": ("0", *_BAD_NUMBERS),
    "--memory": ("0", *_BAD_SIZES),
    "--disk": _BAD_SIZES,
    "--gpus": ("-1", "a b", ""),
    "--labels": ("foo", ""),
    "--resources": ("foo", "license=0", ""),
    "--max-concurrent-jobs": ("0", "-1", "foo", ""),
    "--drain-timeout": ("-1", "foo", "nan", "inf", ""),
    "--heartbeat": _SECONDS,
    "--max-log-line": ("0", "foo", "1000000000", ""),
    "--runtime": ("foo", ""),
    "--max-images": ("-1", "foo", ""),
}


def _cases(options: dict[str, tuple[str, ...]]) -> list[Any]:
    return [
        pytest.param(option, value, id=f"{option}={value}") for option, values in options.items() for value in values
    ]


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The line with which a command ends, with exit code 2, before it looks for a cluster or starts one."""
    monkeypatch.setenv("FLUSTER_CLUSTER_ADDRESS", "nats://user:password@127.0.0.1:1")
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_PASSWORD", "secret")

    def run(*words: str, then: Callable[[], None] | None = None) -> str:
        monkeypatch.setattr(sys, "argv", ["fluster", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        if ended.value.code == 0 and then is not None:
            with pytest.raises(SystemExit) as ended:
                then()
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2, line
        assert isinstance(line, str)
        return line

    return run


def _check(line: str, option: str, value: str) -> None:
    assert line.startswith(f"fluster: {option}"), line
    assert value in line or len(value) > 20
    assert len(line) > len(f"fluster: {option}={value}") + 10, "and the remedy"


@pytest.mark.parametrize(("option", "value"), _cases(SUBMIT))
def test_submit(refused: Refused, option: str, value: str) -> None:
    _check(refused("submit", f"{option}={value}", "--", "true"), option, value)


@pytest.mark.parametrize("verb", ["add", "set"])
@pytest.mark.parametrize(("option", "value"), _cases(NAMESPACE))
def test_namespace(refused: Refused, verb: str, option: str, value: str) -> None:
    _check(refused("namespace", verb, "team-a", f"{option}={value}"), option, value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "a.b"), "invalid namespace 'a.b'"),
        (("add", "sys"), "'sys' is the namespace of the cluster itself"),
        (("set", "team-a"), "nothing is to be changed: give --cpus"),
        (("drop", "team-a"), "give --yes where you cannot be asked"),
    ],
)
def test_what_is_wrong_with_a_namespace(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert told in refused("namespace", *words)


@pytest.mark.parametrize(("option", "value"), _cases(UP))
def test_up(refused: Refused, option: str, value: str) -> None:
    _check(refused("up", f"{option}={value}"), option, value)


@pytest.mark.parametrize(
    ("start", "option", "value"),
    [
        pytest.param((daemon, become), *each.values, id=f"{daemon} {each.id}")
        for daemon, become, options in (("controller", controller, CONTROLLER), ("worker", worker, WORKER))
        for each in _cases(options)
    ],
)
def test_daemons(
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
    start: tuple[str, Callable[[], None]],
    option: str,
    value: str,
) -> None:
    daemon, become = start

    def execve(_path: str, _command: list[str], environment: dict[str, str]) -> None:
        """The daemon would be in this process, with nothing of the command's but its environment."""
        for name, text in environment.items():
            monkeypatch.setenv(name, text)
        raise typer.Exit

    monkeypatch.setattr(os, "execve", execve)
    _check(refused(daemon, "start", f"{option}={value}", then=become), option, value)


def test_a_full_stdout_is_said_in_one_line() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - what a shell does
        done = subprocess.run(
            [sys.executable, "-c", "from fluster.cli import main; main()", "local"],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "fluster: the output could not be written: No space left on device\n"
