"""A registry that engines pull one image from (https://distribution.github.io/distribution/spec/api/)."""

import contextlib
import gzip
import hashlib
import io
import json
import secrets
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_UNKNOWN = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}).encode()


class Registry:
    """What is served, and how often it was asked for."""

    def __init__(self, content: bytes) -> None:
        self.asked: list[str] = []  # the paths, in order
        self.gate = threading.Event()  # closed, half of each answer is kept back
        self.gate.set()
        self.kept_back = ""  # only of answers on paths with this in them
        self.is_mute = False  # all of those is, so that a connection is taken and nothing is said
        self.refusal = ""  # with these words, if any, it refuses all that is asked for
        self._blobs: dict[str, bytes] = {}  # {digest: content}
        self._manifests: dict[str, bytes] = {}  # {digest: manifest}
        self.push(content)

    def push(self, content: bytes) -> None:
        """Have all tags mean an image with that content from now on. The one before has its digest still."""
        files = _tar({"word": content, "bin/busybox": Path(shutil.which("busybox") or "/bin/busybox").read_bytes()})
        layer = gzip.compress(files, mtime=0)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [_digest(files)]},
            }
        ).encode()
        described = [
            {"mediaType": kind, "size": len(data), "digest": self._add(data)}
            for kind, data in ((_CONFIG, config), (_LAYER, layer))
        ]
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": described[0], "layers": described[1:]}
        data = json.dumps(manifest).encode()
        self.digest = _digest(data)  # of the image that tags mean
        self._manifests[self.digest] = data

    def forget(self, digest: str) -> None:
        """Have that image no more, nor what it is made of: engines keep manifests for a while."""
        manifest = json.loads(self._manifests.pop(digest))
        for each in (manifest["config"], *manifest["layers"]):
            del self._blobs[each["digest"]]

    def _add(self, data: bytes) -> str:
        self._blobs[_digest(data)] = data
        return _digest(data)

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """The type and content of what lies at a path."""
        self.asked.append(path)
        if path == "/v2/":
            return "application/json", b"{}"
        _, is_manifest, name = path.partition("/manifests/")
        if is_manifest:
            manifest = self._manifests.get(self.digest if name in ("latest", "1") else name)
            return None if manifest is None else (_MANIFEST, manifest)
        data = self._blobs.get(path.rpartition("/")[2])
        return None if data is None else ("application/octet-stream", data)


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@contextmanager
def running_registry(content: bytes | None = None) -> Iterator[tuple[str, Registry]]:
    """Its address, which engines take for one that needs no TLS since it is the machine's own, and the registry.

    Its image has a file with that content, else with one that no engine has met before, and busybox.
    """
    registry = Registry(secrets.token_bytes() if content is None else content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = registry.answer(self.path)
            if registry.is_mute and registry.kept_back in self.path:
                registry.gate.wait()
            if registry.refusal and self.path != "/v2/":
                errors = [{"code": "DENIED", "message": registry.refusal}]
                self.send_response(403)
                kind, data = "application/json", json.dumps({"errors": errors}).encode()
            else:
                self.send_response(404 if found is None else 200)
                kind, data = found or ("application/json", _UNKNOWN)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            if kind == _MANIFEST:
                self.send_header("Docker-Content-Digest", _digest(data))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):  # an engine without room hangs up, or whose user has
                    self.wfile.write(data[: len(data) // 2])
                    if registry.kept_back in self.path:
                        registry.gate.wait()
                    self.wfile.write(data[len(data) // 2 :])

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", registry
    finally:
        registry.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
