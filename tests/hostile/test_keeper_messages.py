"""Between a worker and the keeper of an attempt stands a socket that a task can reach: neither end dies of what it reads there."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluster_bus.messages import Progress
from fluster_services.worker.contract.attempt_directory import SOCKET_FILE
from fluster_services.worker.contract.attempt_records import LaunchSpec
from fluster_services.worker.contract.runtime import Exited, Progressed, Spooled
from fluster_services.worker.runtimes.process_task import ProcessTask
from tests.hostile.test_messages import VALUES
from tests.system.runtime_site import Site, end_of, shared_template, site, templates  # noqa: F401 - fixtures

pytestmark = pytest.mark.anyio

NUMBERS = ["NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-1", '"' + "9" * 5_000 + '"', "null", "[]", "{}", '"x"']
NOT_MESSAGES = ["?", "[" * 50_000, "null", "[1]", "7", '"x"', "\ud800"]
END = {"exited": {"exit_code": 0, "signal": None, "reason": "exited"}}


def _lines(verbs: list[str]) -> list[bytes]:
    """Messages with those names, of values of any type, and lines that are not messages."""
    lines = [json.dumps({verb: {}}) for verb in verbs]
    lines += [f'{{"{verb}": {number}}}' for verb in verbs for number in NUMBERS] + NOT_MESSAGES

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(st.sampled_from(verbs), VALUES, min_size=1, max_size=2))
    def collect(message: dict[str, object]) -> None:
        lines.append(json.dumps(message))

    collect()
    return [line.encode(errors="surrogatepass") + b"\n" for line in lines]


async def test_a_worker_passes_over_what_is_no_message_of_a_keeper(tmp_path: Path) -> None:
    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = _lines(["started", "spooled", "progress", "idle", "refused"])
        lines += [b'{"spooled": 1, "flushed": %b}\n' % number.encode() for number in NUMBERS]
        lines += [b'{"progress": [%b, "a"]}\n' % number.encode() for number in NUMBERS]
        lines += [b'{"progress": [0.5, "\\ud800"]}\n', b'{"started": {"pid": 7, "started_at": NaN}}\n']
        writer.write(b"".join(lines) + json.dumps(END).encode() + b"\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(keep, tmp_path / SOCKET_FILE):
        task = ProcessTask(LaunchSpec(key="ns.job.0.1", command=["true"]), tmp_path, set())
        try:
            assert await task.connect()
            events = [event async for event in task.events()]
        finally:
            await task.detach()
    (ended,) = [event for event in events if isinstance(event, Exited)]
    assert ended.record.exit_code == 0
    assert all(event.offset >= 0 for event in events if isinstance(event, Spooled))
    for event in events:
        if isinstance(event, Progressed):
            Progress(fraction=event.fraction, message=event.message).to_json()


def _say(directory: Path, line: bytes) -> bytes:
    """What the keeper in `directory` answers, until it has heard the line, or lets go of who says it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(directory / SOCKET_FILE))
        heard = b""
        try:
            connection.sendall(line + b'{"flush": 1}\n')
            while b'"flushed"' not in heard:
                data = connection.recv(4096)
                if not data:
                    break
                heard += data
        except (BrokenPipeError, ConnectionResetError):
            pass
        return heard


async def test_a_keeper_lives_on_whatever_it_is_told(site: Site) -> None:  # noqa: F811
    task = await site.command("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done", kill_grace_s=60.0)
    lines = [b'{"%b": %b}\n' % (verb, number.encode()) for verb in (b"renew", b"flush") for number in NUMBERS[:4]]
    lines += [b'{"kill": %b}\n' % number for number in (b"NaN", b"Infinity", b"1" + b"0" * 400, b"[]", b"{}", b'"x"')]
    lines += [b'{"renew": 60, "sent_since_boot_s": %b}\n' % number.encode() for number in NUMBERS[:4]]
    lines += [line.encode(errors="surrogatepass") + b"\n" for line in NOT_MESSAGES]
    lines += [b'{"assign": 1}\n', b'{"assign": {}}\n', b'{"forget": []}\n']
    for line in lines:
        await asyncio.to_thread(_say, task.directory, line)
    (task.directory / "work" / "go").touch()
    assert (await end_of(task)).exit_code == 0
    await task.forget()
