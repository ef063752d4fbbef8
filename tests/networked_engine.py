"""An engine with networks as Docker has them, for what brings its own: containers that find each other by name, published ports.

Ours lives in a network namespace of its own, with rules of its own, and reaches the machine's network through slirp4netns, a
program like any other: nothing of the machine's network is touched. Its published ports are seen from inside that namespace.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker_engine import Engine, OwnEngine, find_engine, lent
from tests.waiting import wait_until

_PROGRAMS = ("dockerd", "containerd", "runc", "setpriv", "unshare", "nsenter", "ip", "slirp4netns")
_NAME_SERVER = "nameserver 10.0.2.3\n"  # slirp4netns's own, which asks the machine's
_ENTER = 'ip link set lo up && mount --bind "$0" /etc/resolv.conf && exec dockerd "$@"'
_KEPT_S = 7 * 86_400


class NetworkedEngine(OwnEngine):
    """One that this process has started in a network namespace."""

    def __init__(self, folder: Path, data: Path) -> None:
        (folder / "resolv.conf").write_text(_NAME_SERVER)
        self._uplink: subprocess.Popen[bytes] | None = None
        super().__init__(folder, data)
        # What builds have left, but not what the next one builds upon.
        self.client.prune_images({"dangling": True, "until": f"{int(time.time() - _KEPT_S)}"})

    def _command(self) -> list[str]:
        return ["unshare", "--net", "--mount", "sh", "-c", _ENTER, str(self._folder / "resolv.conf")]

    def start(self) -> None:
        super().start()
        self._uplink = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "TERM",
                "--",
                "slirp4netns",
                "--configure",
                "--disable-host-loopback",
                str(self.pid),
                "tap0",
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        wait_until(lambda: b"tap0" in Path(f"/proc/{self.pid}/net/dev").read_bytes(), describe=self.last_words)

    def stop(self) -> None:
        if self._uplink is not None:
            self._uplink.terminate()
            self._uplink.wait()
        super().stop()

    def remove_containers(self) -> None:
        super().remove_containers()
        self.client.prune_networks()
        self.client.prune_volumes()


def from_outside(engine: Engine) -> list[str]:
    """What a command begins with that reaches the ports which `engine` publishes."""
    return ["nsenter", f"--net=/proc/{engine.pid}/ns/net", "--"] if isinstance(engine, NetworkedEngine) else []


@pytest.fixture(scope="module")
def networked_engine() -> Iterator[Engine]:
    """An engine whose containers have networks; without one as `engine` has it."""
    yield from lent(lambda: find_engine(NetworkedEngine, data="docker-data-networked", programs=_PROGRAMS))
