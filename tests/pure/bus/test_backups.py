"""What belongs into a backup, in which order, and how it is written."""

from __future__ import annotations

import io
import json

import cramjam
import pytest

from fluster_bus.backups.archive import ArchiveWriter, StoredMessage, goes_on_after, header_block
from fluster_bus.backups.contents import ALIVE_ONLY, KINDS, plan, restoring_order
from fluster_bus.core import buckets
from fluster_bus.core.stream_bounds import MAX_BUDGET_BYTES, SHARES, NamespaceBounds, shares
from fluster_bus.storage.stream_configs import namespace_streams, system_streams

NAMESPACES = ("default", "team_a")
OF_NAMESPACES = [
    str(each.config.name)
    for namespace in NAMESPACES
    for each in namespace_streams(namespace, shares(MAX_BUDGET_BYTES), NamespaceBounds())
]
STREAMS = [*(str(each.config.name) for each in system_streams()), *OF_NAMESPACES]


def test_each_stream_of_a_cluster_is_in_its_backup_or_is_said_to_live_with_its_writers() -> None:
    """A stream that is new has to be put into one of the lists in contents.py, and into docs/how-to/backups.md."""
    planned = plan([*STREAMS, buckets.ROOM_STREAM, "OTHERS"])
    assert {part.stream for part in planned.parts} == set(STREAMS) - set(ALIVE_ONLY)
    assert planned.left_out == ("OTHERS",)
    assert set(KINDS) == set(SHARES)


def test_streams_are_read_in_an_order_in_which_none_lacks_what_another_names() -> None:
    steps = [(step.kind, step.namespace) for step in plan(STREAMS).steps]
    assert steps[0] == ("submissions", None)
    for namespace in NAMESPACES:
        kinds = [kind for kind, of in steps if of == namespace]
        first = {kind: kinds.index(kind) for kind in kinds}
        last = {kind: len(kinds) - 1 - kinds[::-1].index(kind) for kind in kinds}
        assert first["events"] < first["jobs"]
        assert first["calls"] < first["actors"]
        assert first["secrets"] < first["jobs"] < last["secrets"]
        assert all(first["jobs"] < first[kind] for kind in ("results", "logs", "bundles", "payloads"))
    restored = [part.kind for part in restoring_order(plan(STREAMS).parts)]
    assert restored[-1] == "submissions"
    assert set(restored[-3:-1]) == {"jobs"}


def test_what_a_restore_that_ended_in_the_middle_has_left_is_known_by_any_stream() -> None:
    assert {part.namespace for part in plan(["FLUSTER_LOGS_team_a"]).parts} == {"team_a"}


@pytest.mark.parametrize("last", [0, 1, 499_999_999, 500_000_001, 999_999_999, 1_000_000_000, 3_700_000_000])
def test_a_stream_goes_on_far_above_what_it_had(last: int) -> None:
    follows = goes_on_after(last)
    assert follows % 1_000_000_000 == 0
    assert 500_000_000 <= follows - last <= 1_500_000_000
    assert goes_on_after(follows) == follows + 1_000_000_000


def test_headers_are_those_of_the_writer_alone() -> None:
    stored = {"Nats-Msg-Id": "a.1", "Nats-Sequence": "7", "Nats-Stream": "S", "KV-Operation": "DEL"}
    assert header_block(stored) == b"NATS/1.0\r\nNats-Msg-Id: a.1\r\nKV-Operation: DEL\r\n\r\n"
    assert header_block({"Nats-Subject": "x"}) == b""


def test_an_archive_has_its_messages_by_their_sequences() -> None:
    file = io.BytesIO()
    archive = ArchiveWriter(file, first=2, last=1_000_000_000, messages=2, size=100)
    archive.write(StoredMessage(5, "a.b", 1_700_000_000_000_000_001, b"", b"data"))
    with pytest.raises(ValueError, match="sequence 5 does not lie between 5 and"):
        archive.write(StoredMessage(5, "a.b", 0, b"", b""))
    archive.write(StoredMessage(300, "a.c", -1, b"NATS/1.0\r\n\r\n", b""))
    archive.finish()
    data = bytes(cramjam.snappy.decompress(file.getvalue()))
    assert data.startswith(b"NATSARC1\x0a\x00\x00\x00")
    state = json.loads(data[data.index(b"{") : data.index(b"}") + 1])
    assert (state["first_seq"], state["last_seq"], state["messages"]) == (2, 1_000_000_000, 2)
    assert b"\x05\x00\x04a.bdata" in data
    assert b"\x03\x01\xac\x02\x0c\x00a.cNATS/1.0\r\n\r\n" in data
    assert data.endswith(bytes(5))
    assert (archive.messages, archive.newest) == (2, 300)
