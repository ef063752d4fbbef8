"""Big arguments and results: by memory that caller and actor share, against the same by messages and the object store."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.actor_work import LARGE, MIB, median_s
from benchmarks.row import Row
from fluster import LocalCluster, actor, deploy
from fluster_bus.payloads.arenas import SIZE_VARIABLE

ECHOES, LARGE_CALLS = 300, 20


class Buffer:
    """As arrays do it: its memory travels beside the pickle."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: Any) -> tuple[type[Buffer], tuple[Any]]:
        return Buffer, (pickle.PickleBuffer(self.data),)


@actor
class Echo:
    def echo(self, value: Any) -> Any:
        return value

    def size(self, value: Buffer) -> int:
        return len(value.data)


@dataclass(frozen=True)
class Measured:
    """Seconds."""

    echo: float  # of 1 MiB of bytes, there and back
    first: float  # 64 MiB, there, the first time
    warm: float
    large_echo: float  # there and back


def measure() -> Measured:
    with LocalCluster() as cluster:
        pool = deploy(cluster, Echo)
        small, large = os.urandom(MIB), Buffer(bytearray(os.urandom(LARGE)))
        echo = median_s(lambda: pool.call().echo(small), ECHOES, warm_up=20)
        first = median_s(lambda: pool.call().size(large), 1, warm_up=0)
        warm = median_s(lambda: pool.call().size(large), LARGE_CALLS, warm_up=3)
        return Measured(echo, first, warm, median_s(lambda: pool.call().echo(large), LARGE_CALLS, warm_up=3))


def _measured_elsewhere(**variables: str) -> Measured:
    command = [sys.executable, "-m", "benchmarks.payloads"]
    done = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True)
    return Measured(**json.loads(done.stdout))


def run() -> list[Row]:
    """A process of its own for each: memory is warm or cold for the whole process."""
    shared, sent = _measured_elsewhere(), _measured_elsewhere(**{SIZE_VARIABLE: "0"})
    rate, plain_rate = (MIB / 1e6 / each.echo for each in (shared, sent))
    return [
        Row("1 MiB echo, one way", f"{rate:,.0f} MB/s", f"by messages {plain_rate:,.0f} MB/s", rate / plain_rate),
        _row("64 MiB buffer, first call", shared.first, sent.first),
        _row("the same, warm", shared.warm, sent.warm),
        _row("the same, there and back", shared.large_echo, sent.large_echo),
    ]


def _row(what: str, shared: float, sent: float) -> Row:
    return Row(what, f"{shared * 1e3:.1f} ms", f"by the object store {sent * 1e3:.0f} ms", shared / sent)


if __name__ == "__main__":
    from benchmarks.payloads import measure as measure_here  # not of `__main__`: actors must find the same classes

    sys.stdout.write(json.dumps(asdict(measure_here())))
