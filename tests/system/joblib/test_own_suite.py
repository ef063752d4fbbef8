"""joblib's own tests of Parallel, of the version that is installed, with Fluster's backend in place of loky's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tests.system.joblib.own_suite import HALF
from tests.system.processes import Family

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[3]
_IMPORT = "from joblib import Parallel, delayed\n"
_REGISTER = "from fluster.integrations.joblib import register; register()\n"


def with_fluster(source: str) -> str:
    """The tests with "fluster" where "loky" is an argument or one of several, and known to the programs that they run."""
    processes = 'PROCESS_BACKENDS = ["multiprocessing", "loky"]'
    assert processes in source
    source = source.replace(processes, 'PROCESS_BACKENDS = ["fluster"]')
    source = re.sub(r'(?<!== )"loky"(?=[,\])])', '"fluster"', source)
    return source.replace(_IMPORT, _IMPORT + _REGISTER)


@pytest.mark.parametrize("half", [0, 1])  # all at once are too long for one test on a busy machine
def test_joblib_s_own_tests_pass(tmp_path: Path, half: int) -> None:
    source = (files("joblib.test") / "test_parallel.py").read_text(encoding="utf-8")
    (tmp_path / "test_parallel.py").write_text(with_fluster(source), encoding="utf-8")
    family = Family()
    options = ["-p", "tests.system.joblib.own_suite", "-p", "no:cacheprovider", "-q", "--tb=short", "-W", "ignore"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "test_parallel.py"],
        cwd=tmp_path,
        env=family.environment(PYTHONPATH=os.pathsep.join([str(_ROOT), str(tmp_path)]), **{HALF: str(half)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 55, done.stdout
    family.wait_gone()
