"""What a daemon shows to the program that watches it: a file that is touched while the bus answers, and is gone before."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from fluster_bus.core.errors import DisconnectedError
from fluster_services import daemon


class _FlakyBus:
    """Is away for every second message; `seen` tells whether the file was there when each was sent."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seen: list[bool] = []
        self.enough = asyncio.Event()

    async def flush(self) -> None:
        self.seen.append(self._file.exists())
        self._file.unlink(missing_ok=True)
        if len(self.seen) == 6:
            self.enough.set()
        if len(self.seen) % 2 == 0:
            raise DisconnectedError("the bus is away")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "alive"
    monkeypatch.setenv("FLUSTER_ALIVE_FILE", str(file))
    return file


@pytest.mark.anyio
async def test_it_is_touched_when_the_bus_has_answered_and_only_then(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "_SIGN_OF_LIFE_S", 0)
    bus, ready = _FlakyBus(file), asyncio.Event()
    showing = asyncio.create_task(daemon.show_life(cast("Any", bus), ready, file))
    await asyncio.sleep(0)
    assert bus.seen == []
    ready.set()
    await asyncio.wait_for(bus.enough.wait(), 60)
    showing.cancel()
    assert bus.seen[:6] == [False, True, False, True, False, True]


def test_that_of_an_earlier_life_is_removed(file: Path) -> None:
    file.touch()
    assert daemon.alive_file() == file
    assert not file.exists()


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUSTER_ALIVE_FILE", raising=False)
    assert daemon.alive_file() is None


def test_a_file_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLUSTER_ALIVE_FILE", str(tmp_path / "file" / "alive"))
    assert daemon.alive_file() == tmp_path / "file" / "alive"
