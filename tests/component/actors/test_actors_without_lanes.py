"""Calls mean the same where all of them take the one connection of their process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fluster.actors.protocol.members import LANES_VARIABLE
from tests.component.actors.test_actor_payloads import *  # noqa: F403 - its tests are this module's too
from tests.component.actors.test_actors import *  # noqa: F403


@pytest.fixture(scope="module", autouse=True)
def no_lanes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LANES_VARIABLE, "off")
        yield
