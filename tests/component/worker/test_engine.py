"""Reaching an engine, where there is none."""

from __future__ import annotations

import gc
import socket
import threading
from pathlib import Path

import pytest

from fluster_services.worker.engine import EngineError, connect, find_api_version, told


@pytest.mark.parametrize("is_left", [False, True], ids=["no socket", "a socket that nobody listens at"])
def test_an_engine_that_is_not_there_is_told_and_leaves_nothing_open(tmp_path: Path, is_left: bool) -> None:
    url = f"unix://{tmp_path / 's'}"
    if is_left:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "s"))
    reason = "Connection refused" if is_left else "No such file or directory"
    with pytest.raises(EngineError, match=rf"the Docker engine at {url} cannot be reached: {reason}"):
        find_api_version(url)
    client = connect(url, timeout_s=5.0, api_version="1.41")
    with pytest.raises(EngineError, match=reason), told(url):
        client.ping()
    client.close()
    gc.collect()  # an unclosed socket is an error here


@pytest.mark.parametrize(
    ("answer", "words"),
    [(b'{"Name": "other"}', "is not a Docker engine: it told no version"), (b"hello", "cannot be reached")],
)
def test_what_is_no_engine_is_told_as_such(tmp_path: Path, answer: bytes, words: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(answer))
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(EngineError, match=words):
            find_api_version(f"unix://{tmp_path / 's'}")
        serving.join()
