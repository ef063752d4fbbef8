"""A cluster whose disk is full for a while."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluster import ActorContext, ActorPool, ActorTimeoutError, LocalCluster, actor, deploy
from tests.system.small_disks import fill, mounted

PATIENCE_S = 60.0


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
    with mounted(tmp_path / "disk", megabytes=128) as disk:
        yield disk


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
