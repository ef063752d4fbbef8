"""CPython's own tests of executors, with that of a worker pool in their place. They are those of Python 3.13, the first to have a folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import optional
from tests.system.processes import Family

pytestmark = pytest.mark.slow

_FOLDER = "test_concurrent_futures"
_VERSION = "3.13"
_FIND = f"import os, test; print(os.path.join(os.path.dirname(test.__file__), {_FOLDER!r}))"
# In the workers too. Older Pythons do not know of it.
_INIT = """
import test.support
test.support.Py_GIL_DISABLED = getattr(test.support, "Py_GIL_DISABLED", False)
"""
# Left out: test_max_workers_negative, as the pool has its size before it gives an executor.
_PROGRAM = """
import sys, unittest
from test_concurrent_futures.executor import ExecutorTest
from test_concurrent_futures.test_as_completed import AsCompletedTests
from test_concurrent_futures.test_wait import WaitTests
from test_concurrent_futures.util import BaseTestCase, ExecutorMixin

from fluster import LocalCluster, WorkerPool

class PoolMixin(ExecutorMixin):
    def executor_type(self, max_workers):
        return pool.executor()

kinds = [
    type(f"Pool{tests.__name__}", (PoolMixin, tests, BaseTestCase), {"test_max_workers_negative": None})
    for tests in (ExecutorTest, AsCompletedTests, WaitTests)
]
if __name__ == "__main__":
    with LocalCluster() as cluster, WorkerPool(cluster, ExecutorMixin.worker_count) as pool:
        pool.wait_for_workers()
        load = unittest.defaultTestLoader.loadTestsFromTestCase
        done = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(map(load, kinds)))
    sys.exit(not done.wasSuccessful())
"""


def _suite() -> Path | None:
    """The folder of tests that came with a Python of this machine."""
    for python in (sys.executable, f"python{_VERSION}"):
        environment = {**os.environ, "PYENV_VERSION": _VERSION}
        try:
            found = subprocess.run(
                [python, "-c", _FIND], env=environment, capture_output=True, text=True, timeout=120, check=False
            )
        except FileNotFoundError:
            continue
        folder = Path(found.stdout.strip())
        if found.returncode == 0 and (folder / "executor.py").is_file():
            return folder
    return None


def test_python_s_own_tests_of_executors_pass(tmp_path: Path) -> None:
    suite = _suite()
    if suite is None:
        optional.skip("cpython-tests", f"this machine has no Python {_VERSION} with its tests")
    shutil.copytree(suite, tmp_path / _FOLDER)
    (tmp_path / _FOLDER / "__init__.py").write_text(_INIT)
    (tmp_path / "pool_tests.py").write_text(_PROGRAM)
    family = Family()
    done = subprocess.run(
        [sys.executable, "pool_tests.py"],
        cwd=tmp_path,
        env=family.environment(PYTHONPATH=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"^Ran (\d+) tests", done.stderr, re.MULTILINE)
    assert ran is not None, done.stderr
    assert int(ran[1]) >= 21, done.stderr
    family.wait_gone()
