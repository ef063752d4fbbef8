"""`fluster demo`: it works, its counts are checked, and nothing of it is left, however it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.system.processes import Family

_COMMAND = [sys.executable, "-c", "from fluster.cli import main; main()", "demo"]
_TIMEOUT_S = 300


def _demo(family: Family, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_COMMAND, *arguments],
        env=family.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def test_it_reports_and_its_counts_are_right() -> None:
    family = Family()
    done = _demo(family, "--limit-files", "150", "--find", "append", "--workers", "2")
    assert (done.returncode, done.stderr) == (0, "")
    counts = dict(
        re.findall(r"^  (files|not parsed|lines|definitions|names|uses) +([\d,]+)$", done.stdout, re.MULTILINE)
    )
    assert counts["files"] == "150"
    assert int(counts["lines"].replace(",", "")) > 1_000
    assert re.search(r"^Most used: self [\d,]+, ", done.stdout, re.MULTILINE)
    assert re.search(r"^'append' is used [\d,]+ times, in \d+ files$", done.stdout, re.MULTILINE)
    assert "The single process counts the same." in done.stdout
    family.wait_gone()


def test_it_fails_when_the_counts_differ() -> None:
    script = """
from fluster.cli import main
from fluster import demo as stdlib_index

correct = stdlib_index.in_one_process
stdlib_index.in_one_process = lambda paths, find: correct(paths[1:], find)
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "demo", "--limit-files", "20"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "COUNTS DIFFERENTLY" in done.stdout


@dataclass
class AtTerminal:
    """The demo with a terminal for its stderr, where it draws its bar."""

    process: subprocess.Popen[str]
    terminal: int
    shown: str = ""

    def wait_shown(self, pattern: str) -> None:
        """Read the terminal until it shows this."""
        while not re.search(pattern, self.shown):
            self._read()

    def read_rest(self) -> None:
        """Read until no process has the terminal open."""
        while True:
            try:
                self._read()
            except OSError:  # EIO: that is how a terminal says that its other end is gone
                return

    def _read(self) -> None:
        self.shown += os.read(self.terminal, 65_536).decode(errors="replace")


@contextmanager
def _at_terminal(family: Family) -> Iterator[AtTerminal]:
    ours, theirs = os.openpty()
    try:
        with subprocess.Popen(
            _COMMAND,
            env=family.environment(TERM="xterm", COLUMNS="80"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            start_new_session=True,  # so that a signal to its process group is what Ctrl-C is
        ) as process:
            os.close(theirs)
            yield AtTerminal(process, ours)
    finally:
        os.close(ours)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_is_left_when_it_is_ended_in_the_middle(number: signal.Signals) -> None:
    family = Family()
    with _at_terminal(family) as demo:
        demo.wait_shown(r"\b[1-9]\d*/\d+")  # the bar counts files: workers parse, actors collect
        assert family.named("nats-server")
        os.killpg(demo.process.pid, number)
        output, _ = demo.process.communicate(timeout=_TIMEOUT_S)
        family.wait_gone()
        demo.read_rest()
    assert demo.process.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL), demo.shown
    assert output == ""
    assert "Traceback" not in demo.shown
