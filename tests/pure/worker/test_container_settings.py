"""What a worker's environment says about its containers and their images."""

from pathlib import Path

import pytest

from fluster_services.settings import SettingError
from fluster_services.worker.__main__ import _containers
from fluster_services.worker.contract.config import ContainerSettings


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)


def test_what_is_not_said_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_MAX_IMAGES", "")
    assert _containers() == ContainerSettings()


def test_what_is_said_of_builds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authorities = tmp_path / "ca.pem"
    authorities.touch()
    said = {
        "FLUSTER_BUILD_NETWORK": "none",
        "FLUSTER_BUILD_TIMEOUT_S": "60",
        "FLUSTER_BUILD_CA": str(authorities),
        "FLUSTER_MAX_IMAGES": "0",
    }
    for name, text in said.items():
        monkeypatch.setenv(name, text)
    assert _containers() == ContainerSettings(
        build_network="none", build_timeout_s=60.0, build_authorities=str(authorities), max_images=0
    )


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("FLUSTER_BUILD_TIMEOUT_S", "-1", "give seconds"),
        ("FLUSTER_BUILD_CA", "/nowhere/ca.pem", "give the path of a file"),
        ("FLUSTER_MAX_IMAGES", "-1", "give one such as 50"),
        ("FLUSTER_MAX_IMAGES", "many", "give one such as 50"),
    ],
)
def test_a_worker_that_is_told_nonsense_quotes_it(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, remedy: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(SettingError, match=f"{name}='{text}'.*{remedy}"):
        _containers()
