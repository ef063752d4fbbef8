"""What runs in an image that is built, as far as it can be shown outside of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fluster_services.worker.environments import image_install
from fluster_services.worker.environments.image_recipe import INSTALLER


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with what a build is given."""
    monkeypatch.setattr(image_install, "HERE", str(tmp_path))
    (tmp_path / "workspace").mkdir()
    (tmp_path / "settings.json").write_text(json.dumps({"PIP_INDEX_URL": "https://index.example/"}))
    return tmp_path


def look(*name: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-I", "-c", INSTALLER, "look", *name]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_tells_the_version_of_a_python() -> None:
    own = f"{sys.version_info.major}.{sys.version_info.minor}\n"
    assert (look().stdout, look(sys.executable).stdout) == (own, own)
    missing = look("3.99")
    assert (missing.returncode, missing.stderr) == (1, "no Python '3.99' is found there\n")


def test_what_is_run_is_shown_and_ends_the_build_when_it_fails(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    image_install.run("/bin/sh", "-c", 'echo "$PIP_INDEX_URL $HOME $(pwd)"')
    assert capfd.readouterr().out == (
        f'$ sh -c echo "$PIP_INDEX_URL $HOME $(pwd)"\nhttps://index.example/ /tmp {here}/workspace\n'
    )
    with pytest.raises(SystemExit, match="3"):
        image_install.run("/bin/sh", "-c", "exit 3")


def test_a_program_for_another_c_library_is_told(here: Path) -> None:
    with pytest.raises(SystemExit, match=r"/uv does not run in the image .*: take one with glibc"):
        image_install.run(f"{here}/uv", "sync")


def test_certificates_are_trusted_beside_the_images_own(here: Path) -> None:
    assert "PIP_CERT" not in image_install.variables()
    (here / "ca.pem").write_text("OURS")
    trusted = Path(image_install.variables()["PIP_CERT"]).read_text()
    assert trusted.endswith("OURS")
    assert image_install.variables()["SSL_CERT_FILE"] == str(here / "both.pem")
