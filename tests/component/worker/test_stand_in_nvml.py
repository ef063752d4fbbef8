"""The stand-in for NVIDIA's library answers as that did on a real machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.gpus.stand_in import FakeGpu, StandIn, build

_RECORDED = Path(__file__).parents[2] / "gpus" / "recorded_h100.json"


def test_calls_are_answered_as_recorded(tmp_path: Path) -> None:
    stand_in = StandIn(build(tmp_path), tmp_path / "gpus")
    held = ("c", 526, 2_690_646_016)
    stand_in.show(FakeGpu(0, bus_id="00000000:00:06.0", memory=85_520_809_984, reserved=503_316_480, processes=[held]))
    command = [sys.executable, "-m", "tests.gpus.record"]
    done = subprocess.run(command, env={**os.environ, **stand_in.variables}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said, recorded = json.loads(done.stdout), json.loads(_RECORDED.read_text())
    assert said.keys() == recorded.keys()
    assert {name: said[name] for name in said if said[name] != recorded[name]} == {}
