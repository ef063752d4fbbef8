"""What this machine has."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from fluster_bus.address import BusAddress
from fluster_bus.messages import Capacity


def detect_capacity(*, cpu: float | None = None, memory: int | None = None) -> Capacity:
    """The machine's CPUs, memory and free disk, unless given."""
    return Capacity(
        cpu=cpu
        if cpu is not None
        else float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        memory=memory if memory is not None else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk=shutil.disk_usage(Path.home()).free,
    )


def detect_host(address: BusAddress) -> str:
    """How other machines reach this one: by the address from which it reaches the bus, or by name when that is itself."""
    server = urlsplit(address.servers[0])
    try:
        family, _, _, _, target = socket.getaddrinfo(server.hostname, server.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing, only looks up the way
            host = str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
    return socket.gethostname() if host == "::1" or host.startswith("127.") else host
