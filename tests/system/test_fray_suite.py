"""Fray's own tests of clients and actors, with Fluster's client in place of theirs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.docker_image import cache_folder
from tests.optional import import_or_skip
from tests.system.processes import Family

import_or_skip("zephyr", "`make setup-zephyr` installs it")

from tests.system.fray_suite import LEFT_OUT

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]
_PACKAGE = "marin-fray"
_FILES = ("test_actor.py", "test_client.py")


def _suite() -> Path:
    """A folder with fray's tests, of the version that is installed. They come with its sources only."""
    version = importlib.metadata.version(_PACKAGE)
    folder = cache_folder() / f"{_PACKAGE}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
            _download(f"{_PACKAGE}=={version}", Path(work))
            (sources,) = Path(work).glob("*.tar.gz")
            found = Path(work) / "tests"
            found.mkdir()
            with tarfile.open(sources) as archive:
                for member in archive.getmembers():
                    path = Path(member.name)
                    if path.parts[1:] in {("tests", name) for name in _FILES}:
                        content = archive.extractfile(member)
                        assert content is not None
                        (found / path.name).write_bytes(content.read())
            assert sorted(each.name for each in found.iterdir()) == sorted(_FILES)
            if not folder.exists():
                shutil.move(found, folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-binary", _PACKAGE, "--disable-pip-version-check", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement],
        check=True,
        stdin=subprocess.DEVNULL,
        timeout=300,
    )


def test_fray_s_own_tests_pass(tmp_path: Path) -> None:
    for name in _FILES:
        shutil.copy(_suite() / name, tmp_path)
    family = Family()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.system.fray_suite", "-p", "no:cacheprovider", "-q", *_FILES],
        cwd=tmp_path,
        env=family.environment(PYTHONPATH=os.pathsep.join([str(_ROOT), str(tmp_path)])),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(rf"(\d+) passed, {len(LEFT_OUT)} xfailed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 17
    family.wait_gone()
