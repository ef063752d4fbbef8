"""Between a worker and the keeper of an attempt stands a socket that a task can reach: neither end dies of what it reads there."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from fluster_services.worker.contract.attempt_directory import SOCKET_FILE
from tests.system.runtime_site import Site, end_of, shared_template, site, templates  # noqa: F401 - fixtures

pytestmark = pytest.mark.anyio

NUMBERS = ["NaN", "Infinity", "-Infinity", "1" + "0" * 400, "-1", '"' + "9" * 5_000 + '"', "null", "[]", "{}", '"x"']
NOT_MESSAGES = ["?", "[" * 50_000, "null", "[1]", "7", '"x"', "\ud800"]


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
