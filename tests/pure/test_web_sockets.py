"""What nats-py's web sockets cost those who have none. Each in an interpreter of its own, where nats-py is not yet imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_SOON = """
import sys
from fluster.later import import_later, import_now
from fluster_services.forking import import_own

import_later("nats")
{importing}
assert "nats" in sys.modules and "aiohttp" not in sys.modules
import nats.aio.transport
print(nats.aio.transport.aiohttp.ClientSession, nats.aio.transport.multidict.CIMultiDict)
"""

_CONNECTS = """
from fluster.cluster import Cluster
try:
    Cluster("nowhere")
except Exception as error:
    assert "nowhere" in str(error)
"""

_OTHERS = """
import importlib, sys, threading
from fluster_bus.connection.web_sockets import without_web_sockets

with without_web_sockets():
    thread = threading.Thread(target=importlib.import_module, args=["aiohttp"])
    thread.start()
    thread.join()
    import nats.aio.transport
print(nats.aio.transport.aiohttp.ClientSession, nats.aio.transport.multidict.CIMultiDict)
"""

_NOT_INSTALLED = """
import sys
from fluster_bus.connection.web_sockets import without_web_sockets

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name in ("aiohttp", "multidict"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
with without_web_sockets():
    import nats.aio.transport
try:
    nats.aio.transport.WebSocketTransport()
except ImportError as error:
    print(error)
print(nats.aio.transport.aiohttp)
"""

_FINDERS_CHANGED = """
import sys
from fluster_bus.connection.web_sockets import without_web_sockets

before = list(sys.meta_path)
with without_web_sockets():
    hiding = list(sys.meta_path)
    sys.meta_path = before
sys.meta_path = hiding
import aiohttp
print(aiohttp.ClientSession)
"""


def _run(folder: Path, script: str) -> str:
    (folder / "aiohttp.py").write_text("ClientSession = 'session'\n")
    (folder / "multidict.py").write_text("CIMultiDict = 'headers'\n")
    command = [sys.executable, "-c", script]
    path = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=path, stdout=subprocess.PIPE, check=True, timeout=60, text=True).stdout


def test_clients_import_aiohttp_when_it_is_used(tmp_path: Path) -> None:
    assert _run(tmp_path, _SOON.format(importing="import_now()")) == "session headers\n"
    assert _run(tmp_path, _SOON.format(importing=_CONNECTS)) == "session headers\n"


def test_daemons_import_aiohttp_when_it_is_used(tmp_path: Path) -> None:
    assert _run(tmp_path, _SOON.format(importing="import_own('nats')")) == "session headers\n"


def test_other_threads_import_aiohttp_meanwhile(tmp_path: Path) -> None:
    assert _run(tmp_path, _OTHERS) == "session headers\n"


def test_nats_py_tells_who_has_no_aiohttp_to_install_it(tmp_path: Path) -> None:
    said, stands_there = _run(tmp_path, _NOT_INSTALLED).splitlines()
    assert "pip install aiohttp" in said
    assert stands_there == "None", "or whoever asks all objects for an attribute meets an ImportError"


def test_nothing_is_hidden_afterwards_whoever_changed_the_finders_meanwhile(tmp_path: Path) -> None:
    assert _run(tmp_path, _FINDERS_CHANGED) == "session\n"
