"""What tests see of the images that are built for jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluster_services.worker.environments.image_recipe import BUILDER_LABEL, KEY_LABEL
from tests.docker_engine import Engine
from tests.system.package_index import PackageIndex, running_index
from tests.system.wheels import make_wheel


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PackageIndex]:
    """An index with the package "indexed", which has had no requests."""
    make_wheel(tmp_path / "index", "indexed")
    with running_index(tmp_path / "index") as running:
        yield running


def left_of_builds(engine: Engine) -> list[str]:
    """What is there only while something is built."""
    containers = engine.client.containers(all=True, filters={"label": BUILDER_LABEL})
    images = engine.client.images(filters={"label": BUILDER_LABEL})
    return [each["Id"] for each in [*containers, *images]]


@contextmanager
def no_built_images(engine: Engine) -> Iterator[None]:
    """What builds leave, and what they make, is removed; at the end nothing of the former is there."""
    for image in left_of_builds(engine):  # of a run that was killed
        engine.client.remove_image(image, force=True)
    try:
        yield
    finally:
        for image in engine.client.images(filters={"label": KEY_LABEL}):
            engine.client.remove_image(image["Id"], force=True)
    assert left_of_builds(engine) == []
