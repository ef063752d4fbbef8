"""Where an environment finds the version of Python that its job names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fluster_bus.messages import EnvironmentConfig
from fluster_services.config import DiskLimits
from fluster_services.worker.contract.container import OWN_MINOR
from fluster_services.worker.contract.faults import BuildError, BuildOutput
from fluster_services.worker.environments.environments import Environments
from fluster_services.worker.environments.folder_cache import FolderCache

pytestmark = pytest.mark.anyio


@pytest.fixture
def environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environments:
    """Those of a worker on whose PATH a shim as pyenv's stands, which has no version set, before all else."""
    shims = tmp_path / "shims"
    shims.mkdir()
    own = OWN_MINOR
    shim = (
        '#!/bin/sh\ncase "$PYENV_VERSION" in\n'
        f'{own}) exec {sys.base_prefix}/bin/python{own} "$@" ;;\n'
        '"") echo "pyenv: $0: command not found" >&2; exit 127 ;;\n'
        '*) echo "pyenv: version $PYENV_VERSION is not installed" >&2; exit 1 ;;\nesac\n'
    )
    for name in ("python", "python3", f"python{own}"):
        (shims / name).write_text(shim)
        (shims / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:/usr/bin:/bin")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.delenv("PYENV_VERSION", raising=False)
    cache = FolderCache(tmp_path / "environments", 1 << 30, DiskLimits())
    cache.open()
    return Environments(cache, DiskLimits(), build_timeout_s=60)


async def test_a_shim_is_told_the_version(environments: Environments) -> None:
    config = EnvironmentConfig(python=OWN_MINOR)
    said: list[BuildOutput] = []
    python = await environments.use(config, None, "a job", said.append)
    assert python.version == OWN_MINOR
    assert python.python.exists()
    lines = [text for _time, text in said[0].lines]
    assert lines == [f"$ uv venv --quiet --no-project --python {OWN_MINOR} ../venv"], "nothing of what failed first"


async def test_a_version_that_no_shim_has_is_refused_as_if_there_was_none(environments: Environments) -> None:
    with pytest.raises(BuildError, match=r"--python 3\.99 .* failed:\nerror: "):
        await environments.use(EnvironmentConfig(python="3.99"), None, "a job", lambda _output: None)
