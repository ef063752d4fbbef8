"""What nats-py's web sockets cost those who have none. Each in an interpreter of its own, where nats-py is not yet imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SOON = """
import sys
from fluster.later import import_later, import_now
from fluster_services.own_imports import import_own

import_later("nats")
{importing}
assert "nats" in sys.modules and "aiohttp" not in sys.modules
import nats.aio.transport
print(nats.aio.transport.aiohttp.ClientSession, nats.aio.transport.multidict.CIMultiDict)
"""

_OTHERS = """
import importlib, sys, threading
from fluster_bus.web_sockets import without_web_sockets

with without_web_sockets():
    thread = threading.Thread(target=importlib.import_module, args=["aiohttp"])
    thread.start()
    thread.join()
    import nats.aio.transport
print(nats.aio.transport.aiohttp.ClientSession, nats.aio.transport.multidict.CIMultiDict)
"""


def _run(folder: Path, script: str) -> str:
    (folder / "aiohttp.py").write_text("ClientSession = 'session'\n")
    (folder / "multidict.py").write_text("CIMultiDict = 'headers'\n")
    command = [sys.executable, "-c", script]
    path = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=path, stdout=subprocess.PIPE, check=True, timeout=60, text=True).stdout


def test_clients_import_aiohttp_when_it_is_used(tmp_path: Path) -> None:
    assert _run(tmp_path, _SOON.format(importing="import_now()")) == "session headers\n"


def test_daemons_import_aiohttp_when_it_is_used(tmp_path: Path) -> None:
    assert _run(tmp_path, _SOON.format(importing="import_own('nats')")) == "session headers\n"


def test_other_threads_import_aiohttp_meanwhile(tmp_path: Path) -> None:
    assert _run(tmp_path, _OTHERS) == "session headers\n"
