"""The attacker has a join token, the text and all: with it he may ask to become a worker, and do nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.roles import Role
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage import provisioning
from fluster_bus.trust.authority import Authority
from tests.component.bus.test_permissions import NOT_TO_HEAR, NOT_TO_SEND, OURS, Peer
from tests.component.guarded_server import plain_options

pytestmark = pytest.mark.anyio


@pytest.fixture
async def attacker(tmp_path: Path) -> AsyncIterator[Peer]:
    authority = Authority.of_cluster(tmp_path / "authority")
    with EmbeddedServer(authority=authority) as server:
        url = f"nats://127.0.0.1:{server.port}"
        made = authority.issue(Role.SERVICE, "controllers")
        bus = await Bus.connect(BusAddress(url, token=made.token, seed=made.seed), name="test")
        await provisioning.ensure_system(bus)
        await bus.close()
        made = authority.issue(Role.JOIN, "join-1", lifetime_s=60)
        address = BusAddress(url, token=made.token, seed=made.seed)
        refusals: list[str] = []

        async def on_error(error: Exception) -> None:
            refusals.append(str(error))

        client = Client()
        await client.connect(
            servers=[url],
            **plain_options(address),
            inbox_prefix=address.inbox_prefix().encode(),
            error_cb=on_error,
            allow_reconnect=False,
        )
        yield Peer(client, refusals)
        await client.close()


async def test_who_has_a_join_token_asks_to_join_and_does_nothing_else(attacker: Peer) -> None:
    await attacker.client.publish(subjects.join("join-1"), b"{}")
    assert await attacker.refusals() == []
    more = (
        subjects.join("join-2"),  # for which another would be taken
        subjects.jobs_submit(OURS),
        subjects.jobs_verb(OURS, "list"),
        subjects.ensure_namespace(OURS),
        subjects.workers_list(OURS),
        subjects.actor_any(OURS, "calculator", "add"),
        buckets.bucket_key(buckets.JOINS_BUCKET, buckets.join_token_key("join-1")),
        buckets.bucket_key(buckets.JOINS_BUCKET, buckets.joined_worker_key("w1")),
        buckets.bucket_key(buckets.JOINS_BUCKET, buckets.ISSUED_WORKERS_KEY),
        server_subjects.direct_get(buckets.bucket_stream(buckets.JOINS_BUCKET)),
        f"{subjects.inbox_prefix('w1')}.token",
        "_INBOX.token",
        server_subjects.service_verb("PING"),
        server_subjects.CLAIMS_UPDATE,
    )
    for subject in (*NOT_TO_SEND, *more):
        await attacker.client.publish(subject, b"{}")
        (refusal,) = await attacker.refusals() or ["allowed"]
        assert f'publish to "{subject.lower()}"' in refusal.lower(), subject


async def test_who_has_a_join_token_hears_answers_to_it_alone(attacker: Peer) -> None:
    more = (
        subjects.watch_any(OURS),
        subjects.watch_joins(),
        subjects.join("*"),
        subjects.inboxes_of("sys"),
        subjects.actors_of(OURS),
        subjects.dispatch_any(OURS),
        subjects.heartbeats(),
        server_subjects.service_verb("PING"),
    )
    for subject in (*NOT_TO_HEAR, *more):
        await attacker.client.subscribe(subject)
        (refusal,) = await attacker.refusals() or ["allowed"]
        assert f'subscription to "{subject.lower()}"' in refusal.lower(), subject


async def test_tenants_and_workers_see_no_tokens(tmp_path: Path) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    with EmbeddedServer(authority=authority) as server:
        for role in (Role.WORKER, Role.GATEWAY, Role.AUTOSCALER, Role.CLIENT, Role.JOB):
            made = authority.issue(role, str(role), [OURS] if role.is_confined else [])
            address = BusAddress(f"nats://127.0.0.1:{server.port}", token=made.token, seed=made.seed)
            refusals: list[str] = []

            async def on_error(error: Exception, refusals: list[str] = refusals) -> None:
                refusals.append(str(error))

            client = Client()
            await client.connect(
                servers=address.servers, **plain_options(address), error_cb=on_error, allow_reconnect=False
            )
            peer = Peer(client, refusals)
            try:
                for subject in (
                    subjects.join("join-1"),
                    buckets.bucket_key(buckets.JOINS_BUCKET, buckets.joined_worker_key("w1")),
                    server_subjects.direct_get(buckets.bucket_stream(buckets.JOINS_BUCKET)),
                ):
                    await client.publish(subject, b"{}")
                    assert len(await peer.refusals()) == 1, (role, subject)
                for subject in (subjects.watch_joins(), subjects.join("*")):
                    await client.subscribe(subject)
                    assert len(await peer.refusals()) == 1, (role, subject)
            finally:
                await client.close()


async def test_the_seed_of_a_token_is_needed_to_use_it(attacker: Peer, tmp_path: Path) -> None:
    authority = Authority.of_cluster(tmp_path / "authority")
    seen, own = authority.issue(Role.JOIN, "join-2"), authority.issue(Role.JOIN, "join-3")
    assert attacker.client.connected_url is not None
    address = BusAddress(attacker.client.connected_url.geturl(), token=seen.token, seed=own.seed)
    client = Client()
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization"):
        await client.connect(servers=address.servers, **plain_options(address), allow_reconnect=False)
    await client.close()
