"""Another process that lends and holds payloads on command, a line of JSON at a time."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from fluster_bus.core.errors import PayloadLostError
from fluster_bus.payloads import arenas, payloads

LENT_TIMES = 50_000  # how often what it lends repeats its text


class Block:
    """As arrays do it: its memory travels beside the pickle."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[Block], tuple[Any]]:
        return Block, (pickle.PickleBuffer(self.data),)

    @property
    def start(self) -> str:
        return bytes(self.data[:5]).decode()


def open_arenas() -> int:
    """How many arenas' files this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one by which the folder is read
            found += "memfd:fluster" in str(descriptor.readlink())
    return found


class Peer:
    """The process, seen from the test."""

    def __init__(self, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path), **variables},
        )

    def ask(self, verb: str, *args: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([verb, *args]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def place(self) -> str | None:
        place: str | None = self.ask("place")
        return place

    def lend(self, name: str, text: str) -> bytes:
        return bytes.fromhex(self.ask("lend", name, text))

    def pass_on(self, name: str, text: str) -> bytes:
        return bytes.fromhex(self.ask("pass_on", name, text))

    def hold(self, name: str, payload: bytes) -> bool:
        """Take a payload; whether there was one to hold."""
        return bool(self.ask("hold", name, payload.hex()) == "Held")

    def read(self, name: str) -> str:
        """Decode what is held; how it begins, or why it cannot be read."""
        return str(self.ask("read", name))

    def look(self, name: str) -> str:
        """How what was read begins now."""
        return str(self.ask("look", name))

    def view(self, name: str) -> None:
        """Keep no more of what was read than a part of its memory."""
        self.ask("view", name)

    def drop(self, name: str) -> None:
        self.ask("drop", name)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class _Told:
    """What the process does."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def place(self) -> str | None:
        return arenas.place()

    def lend(self, name: str, text: str) -> str:
        self._kept[name] = payloads.encode(Block(text.encode() * LENT_TIMES))
        return bytes(self._kept[name]).hex()

    def pass_on(self, name: str, text: str) -> str:
        self._kept[name] = payloads.encode_for(Block(text.encode() * LENT_TIMES), payloads.inbox_here("_INBOX") + ".1")
        return bytes(self._kept[name]).hex()

    def hold(self, name: str, payload: str) -> str:
        self._kept[name] = payloads.held(bytes.fromhex(payload))
        return type(self._kept[name]).__name__

    def read(self, name: str) -> str:
        try:
            self._kept[name] = payloads.decode(self._kept[name])
        except PayloadLostError as error:
            return str(error)
        return self.look(name)

    def look(self, name: str) -> str:
        return str(self._kept[name].start)

    def view(self, name: str) -> None:
        self._kept[name] = self._kept[name].data[2:4]

    def drop(self, name: str) -> None:
        del self._kept[name]


def main() -> None:
    told = _Told()
    for line in sys.stdin:
        verb, *args = json.loads(line)
        print(json.dumps(getattr(told, verb)(*args)), flush=True)


if __name__ == "__main__":
    from tests.component.arena_peer import main as same_main  # so that what it pickles is of a module that others have

    same_main()
