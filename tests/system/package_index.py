"""An index of packages on this machine that pip installs from (https://peps.python.org/pep-0503/), and that can be slow to answer."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class PackageIndex:
    """What is served: the wheels in a folder. While `may_answer` is not set, clients wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.url = ""

    def answer(self, path: str) -> bytes | None:
        name = path.rstrip("/").rpartition("/")[2]
        if name.endswith(".whl"):
            return (self.folder / name).read_bytes()
        wheels = sorted(self.folder.glob(f"{name.replace('-', '_')}-*.whl"))
        links = [f'<a href="/{wheel.name}">{wheel.name}</a>' for wheel in wheels]
        return "\n".join(links).encode() if links else None


@contextmanager
def running_index(folder: Path) -> Iterator[PackageIndex]:
    """An index that answers at `url` once it may."""
    index = PackageIndex(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.asked.set()
            index.may_answer.wait()
            found = index.answer(self.path)
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:  # the client is gone
                return

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    index.url = f"http://user:secret@127.0.0.1:{server.server_port}/simple"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield index
    finally:
        index.may_answer.set()
        server.shutdown()
        thread.join()
        server.server_close()
