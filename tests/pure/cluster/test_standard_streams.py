"""A process that was started without standard streams."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluster.cluster.up_clusters import noted, running

_PORTAL = """
import os
from fluster.cluster.portal import Portal
kept = os.open("file", os.O_RDWR | os.O_CREAT)  # the program's own, where it came before
Portal().close()
os.fstat(kept)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_an_event_loop_works_and_ends(closed: str, tmp_path: Path) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", _PORTAL]
    assert subprocess.run(shell, check=False, cwd=tmp_path).returncode == 0


def test_a_cluster_that_cannot_be_noted_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLUSTER_RUN_DIR", str(tmp_path / "run"))
    written = os.write
    monkeypatch.setattr(os, "write", lambda *_: written(os.open("/dev/full", os.O_WRONLY), b"x"))
    with noted(tmp_path / "address.json", tmp_path):
        assert running() == []
    assert "No space left on device; set FLUSTER_CLUSTER_ADDRESS" in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []
