"""What encryption costs a call: the same actor on two clusters of production servers, one with TLS and one without, in turns."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cloudpickle

from benchmarks.actor_work import CALLS, PAYLOAD, WARM_UP, median_s
from benchmarks.row import Row
from fluster import ActorPool, Cluster, actor, deploy
from fluster_bus.core.errors import ConnectError
from fluster_bus.server_configuration import PASSWORDS_FILE, production_configuration, write_credentials
from fluster_bus.server_process import find_binary
from fluster_bus.trust.certificate_folder import CertificateFolder

ROUNDS = 5
LARGER = bytes(16 << 10)  # more lies in memory of the machine, and is not sent


@actor
class Echo:
    def echo(self, data: bytes) -> bytes:
        return data


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _connected(file: Path, started: list[subprocess.Popen[bytes]]) -> Cluster:
    while True:
        try:
            return Cluster(str(file))
        except ConnectError:  # the server is starting
            if any(each.poll() is not None for each in started):
                raise


@contextmanager
def _cluster(folder: Path, scheme: str) -> Iterator[Cluster]:
    """A server with its production configuration, a controller and a worker, each a process of its own."""
    folder.mkdir()
    port, tls_folder = _free_port(), None
    if scheme == "tls":
        tls_folder = str(CertificateFolder(folder).make("server", ["127.0.0.1"]))
    write_credentials(folder, url=f"{scheme}://127.0.0.1:{port}")
    text = production_configuration(tls_folder=tls_folder).replace("0.0.0.0:4222", f"127.0.0.1:{port}")
    (folder / "nats-server.conf").write_text(text.replace('"/data"', f'"{folder}/data"'))
    lines = (folder / PASSWORDS_FILE).read_text().splitlines()
    passwords = dict(line.split("=", 1) for line in lines)
    python = {
        "FLUSTER_JOB_DEFAULT_CREDENTIALS": str(folder / "job_default.json"),
        "FLUSTER_STATE_DIR": str(folder / "worker"),
        "FLUSTER_CPUS": "16",
        "FLUSTER_RUNTIME": "process",
    }
    programs = [
        ([str(find_binary()), "--config", str(folder / "nats-server.conf")], passwords),
        *(
            (
                [sys.executable, "-m", f"fluster_services.{name}"],
                {**python, "FLUSTER_CLUSTER_ADDRESS": str(folder / f"{user}.json")},
            )
            for name, user in (("controller", "service"), ("worker", "worker"))
        ),
    ]
    started = []
    try:
        for words, variables in programs:
            environment = {**os.environ, **variables}
            started.append(subprocess.Popen(words, env=environment, stderr=subprocess.DEVNULL))
        with _connected(folder / "operator.json", started) as cluster:
            yield cluster
    finally:
        for each in reversed(started):
            each.terminate()
            each.wait(60)


def _turns(pools: list[ActorPool[Echo]], data: bytes) -> list[float]:
    """Seconds of one call to each: the median of rounds, in each of which all have their turn."""
    found: list[list[float]] = [[] for _ in pools]
    for _ in range(ROUNDS):
        for own, pool in zip(found, pools, strict=True):
            own.append(median_s(lambda pool=pool: pool.call().echo(data), CALLS, warm_up=WARM_UP))  # type: ignore[misc]
    return [statistics.median(each) for each in found]


def run() -> list[Row]:
    """A blocking call, with and without TLS."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = [stack.enter_context(_cluster(folder / scheme, scheme)) for scheme in ("nats", "tls")]
        pools = [deploy(cluster, Echo) for cluster in clusters]
        measured = [
            (what, _turns(pools, data))
            for what, data in (
                ("blocking call() over TLS, p50", PAYLOAD),
                ("the same with 16 KiB there and back", LARGER),
            )
        ]
        for pool in pools:
            pool.shutdown()
    return [
        Row(what, f"{encrypted_s * 1e6:.0f} µs", f"without {plain_s * 1e6:.0f} µs", encrypted_s / plain_s)
        for what, (plain_s, encrypted_s) in measured
    ]
