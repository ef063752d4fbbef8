"""An answer about a service is believed when it is the service's own: all who hear the question may answer it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fluster.actors import ActorServer
from fluster.cluster import Cluster
from fluster_bus.connection.bus import Bus
from fluster_bus.connection.services_api import read_info
from fluster_bus.core import server_subjects, subjects
from fluster_bus.core.delivery import Delivery
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.roles import Role
from fluster_bus.server import EmbeddedServer
from tests.component.actor_env import Calculator
from tests.hostile.test_forged_replies import OURS, THEIRS, Site, site  # noqa: F401 - a fixture

pytestmark = pytest.mark.anyio

PATIENCE_S = 60


def _info(instance: str, subject: str, **fields: Any) -> dict[str, Any]:
    endpoint = {"name": "forged", "subject": subject, "metadata": {"signature": "forged()"}}
    return {"name": "sums", "id": instance, "endpoints": [{**endpoint, **fields}]}


@contextlib.asynccontextmanager
async def _answering(server: EmbeddedServer, namespace: str, subject: str) -> AsyncIterator[list[str]]:
    """A job that answers all who ask of services; gives where they wanted to hear it."""
    asked: list[str] = []
    bus = await Bus.connect(server.credentials(Role.JOB, namespace), name="forger")

    async def answer(delivery: Delivery) -> None:
        asked.append(delivery.reply)
        body = json.dumps(_info(subjects.last_token(delivery.subject), subject)).encode()
        await bus.publish(delivery.reply, body)

    try:
        await bus.subscribe(subjects.below(server_subjects.service_verb("INFO")), answer)
        await bus.flush()
        yield asked
    finally:
        await bus.close()


def _shown_methods(server: EmbeddedServer) -> list[str] | None:
    environment = {**os.environ, "FLUSTER_CLUSTER_ADDRESS": server.credentials(Role.OPERATOR).to_url()}
    words = [str(Path(sys.executable).with_name("fluster")), "--output", "json", "actor", "sums"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    methods = json.loads(done.stdout)["methods"]
    return None if methods is None else [each["name"] for each in methods]


async def test_what_another_says_of_an_actor_is_not_shown(site: Site) -> None:  # noqa: F811
    with Cluster(site.server.credentials(Role.JOB, OURS)) as job:
        actors = ActorServer(job)
        actors.register("sums", Calculator())
        await asyncio.to_thread(actors.serve_background)
        async with _answering(site.server, THEIRS, "fluster.other.actors.sums.any.forged") as asked:
            methods = await asyncio.to_thread(_shown_methods, site.server)
            assert methods is not None
            assert "add" in methods
            assert asked
            assert all(each.startswith(f"_INBOX.{OURS}.") for each in asked)
        # One of the actor's own namespace may be first, and is believed as far as it names subjects of that actor.
        async with _answering(site.server, OURS, "fluster.sys.workers.w1.drain"):
            methods = await asyncio.to_thread(_shown_methods, site.server)
            assert methods is None or "forged" not in methods
        await asyncio.to_thread(actors.shutdown, 1.0)


def _is_served(subject: str) -> bool:
    return subjects.is_call(OURS, "sums", subject)


@pytest.mark.parametrize(
    "subject",
    [
        "fluster.other.actors.sums.any.add",
        "fluster.default.actors.others.any.add",
        "$JS.API.INFO",
        "fluster.default.actors.sums.any.*",
    ],
)
def test_other_subjects_are_not_believed(subject: str) -> None:
    with pytest.raises(InvalidMessageError, match="which is another's"):
        read_info(json.dumps(_info("e1", subject)).encode(), name="sums", instance="e1", is_served=_is_served)
    own = json.dumps(_info("e1", "fluster.default.actors.sums.any.add")).encode()
    assert read_info(own, name="sums", instance="e1", is_served=_is_served) == [("forged", {"signature": "forged()"})]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["sums", "e1", "\udce9"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "id", "endpoints", "subject", "metadata"]), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
@example(b"[" * 100_000)
@example(json.dumps({"name": "sums", "id": "e1", "endpoints": None}).encode())
@example(json.dumps({"name": "sums", "id": "e1", "endpoints": [{"name": 1, "subject": "", "metadata": []}]}).encode())
def test_any_answer_is_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidMessageError):
        for name, metadata in read_info(data, name="sums", instance="e1", is_served=_is_served):
            assert isinstance(name, str)
            assert all(isinstance(text, str) for text in metadata.values())
