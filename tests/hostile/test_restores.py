"""A tenant meets a cluster that is being restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluster_bus.backups.making import make_backup
from fluster_bus.backups.restoring import restore_backup
from fluster_bus.core import buckets, server_subjects, subjects
from fluster_bus.core.roles import Role
from fluster_bus.core.stream_bounds import BUNDLES
from fluster_bus.messages import Namespace
from fluster_bus.server import EmbeddedServer
from fluster_bus.storage.provisioning import ensure_namespace, ensure_system
from tests.component.conftest import ConnectBus

pytestmark = pytest.mark.anyio

NS = Namespace("default")


async def test_an_acknowledgement_that_is_diverted_into_an_archive_makes_no_stream(
    own_server: EmbeddedServer, connect_bus: ConnectBus, tmp_path: Path
) -> None:
    operator, job = await connect_bus(own_server), await connect_bus(own_server, Role.JOB, NS)
    await ensure_system(operator)
    await ensure_namespace(operator, NS)
    made = await make_backup(operator, tmp_path / "backup")
    (each,) = [each for each in made.streams if each.kind == "jobs"]
    await operator.request(server_subjects.stream_delete(each.stream), b"{}")
    request = json.dumps(each.request(1)).encode()
    told = json.loads((await operator.request(server_subjects.stream_restore(each.stream), request)).data)
    # It would have to guess where the archive goes; here it knows.
    where = told["deliver_subject"]
    await job.publish(subjects.object_part(BUNDLES.name, NS, "0" * 64, 0), b"x", reply=where)
    await job.flush()
    archive = (tmp_path / "backup" / each.stream / "stream.tar.s2").read_bytes()
    await operator.request(where, archive)
    end = json.loads((await operator.request(where, b"")).data)
    assert "error" not in end
    await restore_backup(operator, tmp_path / "backup", replace=True)


async def test_headers_that_look_like_the_server_s_stop_no_backup_and_come_back_as_data(
    own_server: EmbeddedServer, connect_bus: ConnectBus, tmp_path: Path
) -> None:
    operator, job = await connect_bus(own_server), await connect_bus(own_server, Role.JOB, NS)
    await ensure_system(operator)
    await ensure_namespace(operator, NS)
    forged = [
        {
            "Nats-Sequence": "1",
            "Nats-Time-Stamp": "never",
            "Nats-Subject": "$KV.fluster_jobs_default.train",
            "Nats-Stream": "X",
        },
        {"Nats-Num-Pending": "0", "Nats-Last-Sequence": "99"},
        {"Status": "404", "Description": "Message Not Found"},
        {"Nats-Service-Error": "no", "Nats-Service-Error-Code": "500"},
        {"Odd": "caf\u00e9 \u202e"},
    ]
    for number, headers in enumerate(forged):
        await job.request(subjects.durable_calls(NS, "ledger"), b"call %d" % number, headers=headers)
        await job.request(subjects.jobs_submit(NS), b"submission %d" % number, headers=headers)
    await make_backup(operator, tmp_path / "backup")
    await restore_backup(operator, tmp_path / "backup", replace=True)
    for stream, name in ((buckets.calls_stream(NS), b"call"), (buckets.SUBMIT_STREAM, b"submission")):
        stored = [await operator.jetstream.get_msg(stream, sequence) for sequence in range(1, len(forged) + 1)]
        assert [each.data for each in stored] == [b"%s %d" % (name, number) for number in range(len(forged))]
        assert {"Status", "Description"} <= set(stored[2].headers or {})
