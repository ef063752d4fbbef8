"""Messages over asyncio's streams: none is lost to a bad line beside it, or to a wait that is cancelled."""

from __future__ import annotations

import asyncio
import socket

import pytest

from fluster.json_lines import BadLineError, JsonLineStream

pytestmark = pytest.mark.anyio

_MAX_BYTES = 40


async def test_streams_send_and_receive_by_the_same_decoder() -> None:
    here, there = socket.socketpair()
    ours = JsonLineStream(*await asyncio.open_connection(sock=here), _MAX_BYTES)
    reader, writer = await asyncio.open_connection(sock=there)
    theirs = JsonLineStream(reader, writer, _MAX_BYTES)
    theirs.send({"a": 1})
    theirs.send({"b": "x" * _MAX_BYTES})
    theirs.send({"c": 3})
    assert await ours.receive() == {"a": 1}
    with pytest.raises(BadLineError, match="is longer than 40 bytes"):
        await ours.receive()
    assert await ours.receive() == {"c": 3}

    waiting = asyncio.create_task(ours.receive())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    writer.write(b'{"d": 4}\n{"torn": ')
    theirs.close()
    assert (ours.is_open, theirs.is_open) == (True, False)
    assert await ours.receive() == {"d": 4}
    assert await ours.receive() is None
    assert not ours.is_open
    theirs.send({"late": 1})  # as nothing was said
    ours.close()
    await ours.wait_closed()
