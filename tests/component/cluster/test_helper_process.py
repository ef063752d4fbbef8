"""The helper process of a program, as the bus hears it."""

from __future__ import annotations

import os
import signal

import pytest

from fluster.cluster.helper_process import HelperProcess
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.names import Namespace
from fluster_bus.core.roles import Role
from fluster_bus.messages import OwnerReply, OwnerRequest
from fluster_bus.server import EmbeddedServer
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_what_ends_a_session_does_not_end_a_helper_that_has_just_begun(
    bus: Bus, shared_server: EmbeddedServer, namespace: Namespace
) -> None:
    """The program may end by the same signal, before it has seen that its helper is to be replaced."""
    words: list[OwnerRequest] = []

    async def answer(word: OwnerRequest, _subject: str) -> OwnerReply:
        words.append(word)
        return OwnerReply(lease_s=600)

    await bus.serve(subjects.jobs_verb(namespace, "own"), OwnerRequest, answer)
    login = shared_server.credentials(Role.OPERATOR).values()
    helper = HelperProcess({"address": login, "namespace": namespace, "owner": "program"})
    begun = helper.process.pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(begun, number)
    await wait_until_async(lambda: words)
    assert words[0] == OwnerRequest(owner="program")
    assert helper.process.pid == begun
    helper.release()
    assert helper.process.wait(60) == 0
