"""The attacker has a user of one namespace, or a worker, and would like to see, make or end namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from nats.aio.client import Client

from fluster_bus.connection.bus import Bus
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.roles import Role
from fluster_bus.messages import Namespace, NamespaceRecord
from fluster_bus.storage import provisioning
from fluster_bus.storage.streams import namespaces_table
from tests.component.bus.test_permissions import OURS, Peer
from tests.component.guarded_server import KINDS, guarded_server, plain_options

pytestmark = pytest.mark.anyio

_BUCKET = buckets.bucket_stream(buckets.NAMESPACES_BUCKET)
# What reads, changes or removes the record of a namespace, or its streams.
NOT_TO_SEND = (
    buckets.bucket_key(buckets.NAMESPACES_BUCKET, OURS),
    buckets.bucket_key(buckets.NAMESPACES_BUCKET, "new"),
    server_subjects.direct_get(_BUCKET),
    f"{server_subjects.direct_get(_BUCKET)}.{buckets.bucket_key(buckets.NAMESPACES_BUCKET, OURS)}",
    f"$JS.API.STREAM.MSG.GET.{_BUCKET}",
    f"$JS.API.STREAM.PURGE.{_BUCKET}",
    f"$JS.API.STREAM.DELETE.{_BUCKET}",
    f"$JS.API.STREAM.DELETE.{buckets.logs_stream(OURS)}",
    f"$JS.API.STREAM.CREATE.{buckets.logs_stream('new')}",
)


@pytest.mark.parametrize("kind", KINDS)
async def test_tenants_and_workers_neither_see_nor_change_namespaces(kind: str, tmp_path: Path) -> None:
    with guarded_server(kind, (OURS,), tmp_path) as server:
        bus = await Bus.connect(server.credentials(Role.SERVICE), name="test")
        await provisioning.ensure_system(bus)
        await namespaces_table(bus).put(OURS, NamespaceRecord(name=Namespace(OURS)))
        await bus.close()
        for role in (Role.WORKER, Role.GATEWAY, Role.AUTOSCALER, Role.CLIENT, Role.JOB):
            address = server.credentials(role, OURS if role.is_tenant else None, serves=(OURS,) * role.is_confined)
            refusals: list[str] = []

            async def on_error(error: Exception, refusals: list[str] = refusals) -> None:
                refusals.append(str(error))

            client = Client()
            await client.connect(
                servers=address.servers, **plain_options(address), error_cb=on_error, allow_reconnect=False
            )
            peer = Peer(client, refusals)
            try:
                for subject in NOT_TO_SEND:
                    await client.publish(subject, b"{}")
                    assert len(await peer.refusals()) == 1, (role, subject)
                for subject in (subjects.watch_namespaces(), subjects.watch_namespaces(OURS), "fluster.sys.>"):
                    await client.subscribe(subject)
                    assert len(await peer.refusals()) == 1, (role, subject)
            finally:
                await client.close()
