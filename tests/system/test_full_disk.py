"""A cluster whose disk is full for a while."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import ActorContext, ActorPool, ActorTimeoutError, LocalCluster, actor, deploy

PATIENCE_S = 40.0


@actor(durable=True)
class Ledger:
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_restore(self, state: list[int]) -> None:
        self.numbers = state

    def keep(self, ctx: ActorContext, number: int, _ballast: bytes = b"") -> list[int]:
        self.numbers.append(number)
        ctx.save(self.numbers)
        return self.numbers


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if sys.platform != "linux" or mount is None:
        pytest.skip("a small disk needs Linux and mount")
    program = [mount, "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(disk)]
    made = subprocess.run(program, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"a small disk needs the right to mount one: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(file: Path) -> None:
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))


def test_calls_go_on_once_there_is_room_again(small_disk: Path) -> None:
    with LocalCluster(store_dir=small_disk) as cluster:
        pool: ActorPool[Any] = deploy(cluster, Ledger, name="ledger")
        assert pool.call(timeout=PATIENCE_S).keep(0) == [0]
        fill(small_disk / "ballast")
        # Large enough to need room that the server does not have yet; from here on it writes nothing.
        with pytest.raises(ActorTimeoutError):
            pool.call(timeout=2).keep(1, bytes(1 << 19))
        stored_later = pool.submit(timeout=PATIENCE_S).keep(2)
        (small_disk / "ballast").unlink()
        assert stored_later.result(PATIENCE_S)[-1] == 2
        assert pool.call(timeout=PATIENCE_S).keep(3)[-2:] == [2, 3]
