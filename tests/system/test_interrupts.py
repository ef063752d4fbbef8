"""Programs in a terminal in which Ctrl-C is pressed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fluster.cluster import LocalCluster

pytestmark = pytest.mark.slow  # programs take their time to come up

_PROGRAM = """
from pathlib import Path
from fluster import Cluster, WorkerPool
from tests.waiting import wait_until

def stay(number):
    if number > 2:
        wait_until(Path({go!r}).exists, 60)

def run(pool):
    {work}

with Cluster() as cluster:
    pool = WorkerPool(cluster, 2)
    {use}
"""
_SHOW_CURSOR = "\x1b[?25h"


def _read_until(terminal: int, word: str | None) -> str:
    """What the terminal shows up to that word, or else up to the end."""
    shown = ""
    while word is None or word not in shown:
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the program has ended
            assert word is None, shown
            return shown
    return shown


@pytest.mark.parametrize(
    "work",
    [
        "pool.map(stay, range(1000), chunksize=1, progress=True).results()",
        "[item for item in pool.imap_unordered(stay, range(1000), chunksize=1, progress=True)]",
    ],
    ids=["map", "imap_unordered"],
)
@pytest.mark.parametrize("use", ["with pool: run(pool)", "run(pool)"], ids=["with", "without"])
def test_a_bar_stays_where_it_was_above_the_traceback(
    work: str, use: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM.format(work=work, use=use, go=str(tmp_path / "go")), encoding="utf-8")
    mine, its = pty.openpty()
    variables = {"FLUSTER_CLUSTER_ADDRESS": cluster.address, "TERM": "xterm", "PYTHONPATH": str(Path.cwd())}
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=its,
        stderr=its,
        env={**os.environ, **variables},
    )
    os.close(its)
    try:
        shown = _read_until(mine, "3/1000")
        program.send_signal(signal.SIGINT)  # as Ctrl-C does
        rest = _read_until(mine, None)
    finally:
        program.kill()
        program.wait()
        os.close(mine)
    assert "KeyboardInterrupt" in rest, shown + rest
    assert "1000/1000" not in rest
    before, _, traceback = rest.partition("Traceback (most recent call last)")
    assert "/1000" not in traceback
    assert _SHOW_CURSOR in before
