"""Two releases of Fluster on one machine: this tree, and the commit that the file BASE names."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

from tests import optional

ROOT = Path(__file__).parents[2]
_BASE_FILE = Path(__file__).with_name("BASE")
_PACKAGES = ("fluster", "bus/fluster_bus", "services/fluster_services")


@dataclass(frozen=True)
class Release:
    """A source tree from which programs run, with this interpreter and its packages."""

    name: str
    root: Path

    def variables(self) -> dict[str, str]:
        """What the environment of a program has in which this is what `import fluster` finds."""
        return {"PYTHONPATH": os.pathsep.join(str(self.root / part) for part in (".", "bus", "services"))}


NEW = Release("new", ROOT)


@pytest.fixture(scope="session")
def old(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release that others may still have while they update."""
    commit = _BASE_FILE.read_text().strip()
    git = ("git", "-C", str(ROOT))
    try:
        packed = subprocess.run([*git, "archive", commit, *_PACKAGES], capture_output=True, check=False)
    except FileNotFoundError:
        optional.skip("base", "git is not installed, which has the old release")
    if packed.returncode:
        optional.skip(
            "base",
            f"commit {commit} of {_BASE_FILE.relative_to(ROOT)} is not in this checkout, fetch all of its history: "
            f"{packed.stderr.decode().strip()}",
        )
    release = Release("old", tmp_path_factory.mktemp("old"))
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(release.root, filter="data")
    # At once: where Python may not write bytecode itself, every process would compile all that it imports.
    compiled = [sys.executable, "-m", "compileall", "-q", "-j", "2", *_PACKAGES]
    subprocess.run(compiled, cwd=release.root, check=True)
    return release
