"""nats-servers with a configuration that a test writes."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from fluster_bus.server_process import find_binary
from tests.waiting import wait_until


@contextmanager
def configured(folder: Path, configuration: str, port: int = -1) -> Iterator[int]:
    """A nats-server with that configuration; its port."""
    for left in folder.glob("*.ports"):  # by one before it
        left.unlink()
    (folder / "nats.conf").write_text(f"listen: 127.0.0.1:{port}\n{configuration}")
    arguments = [str(find_binary()), "--config", str(folder / "nats.conf"), "--ports_file_dir", str(folder)]
    server = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    try:
        text = wait_until(lambda: "".join(file.read_text() for file in folder.glob("*.ports")))
        yield urlsplit(json.loads(text)["nats"][0]).port or 0
    finally:
        server.kill()
        server.wait()
