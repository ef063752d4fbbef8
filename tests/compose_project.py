"""A project of Docker Compose made of docker-compose.yml, on an engine of the tests, with images that are made here: none can be pulled."""

from __future__ import annotations

import io
import json
import os
import shutil
import ssl
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fluster.cli.app import app
from fluster_bus.server_process import find_binary
from tests.docker_engine import Engine
from tests.networked_engine import from_outside

ROOT = Path(__file__).parents[1]
_DAEMON_USER = 10_001  # of services/Dockerfile
_CA_FILE = "/etc/ssl/certs/ca-certificates.crt"
# How pip and uv of this machine find packages, as far as variables can say it.
_PACKAGE_VARIABLES = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_LABEL = "com.docker.compose.project"


@dataclass
class ComposeProject:
    """`compose` and `outside` run their words; what these print is returned, and a failure is one of the test."""

    engine: Engine
    credentials: Path
    port: int = 4222
    name: str = field(default_factory=lambda: f"t{uuid.uuid4().hex[:8]}")
    is_group: bool = False  # of three servers, at this port and the two above

    def __post_init__(self) -> None:
        ports = range(self.port, self.port + (3 if self.is_group else 1))
        self.trust("passwords", str(self.credentials), "--url", ",".join(f"tls://127.0.0.1:{port}" for port in ports))
        for name in ("service.json", "worker.json", "job_default.json"):
            os.chown(self.credentials / name, _DAEMON_USER, _DAEMON_USER)

    def trust(self, *words: str) -> None:
        """Run a command of `fluster credentials`."""
        done = CliRunner().invoke(app, ["credentials", *words])
        assert done.exit_code == 0, done.output

    def compose(self, *words: str, status: int = 0, **variables: str) -> str:
        """What `docker-compose` says."""
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        environment = {
            "DOCKER_HOST": self.engine.host,
            "FLUSTER_IMAGE": "fluster-test-compose",
            "FLUSTER_BASE_IMAGE": f"{self.engine.image}-with-packages",
            "NATS_IMAGE": "fluster-test-nats",
            "FLUSTER_CREDENTIALS_DIR": str(self.credentials),
            "FLUSTER_PORT": str(self.port),
            "FLUSTER_PORT_2": str(self.port + 1),
            "FLUSTER_PORT_3": str(self.port + 2),
            **({"COMPOSE_PROFILES": "three"} if self.is_group else {}),
            **variables,
        }
        return _run([*command, "--project-name", self.name, *words], environment, status, timeout_s=300)

    def outside(self, *words: str, user: str = "client_default") -> str:
        """What a Python of this machine prints that is run beside the engine, as `user` of the cluster."""
        command = [*from_outside(self.engine), sys.executable, *words]
        address = str(self.credentials / f"{user}.json")
        return _run(command, {"FLUSTER_CLUSTER_ADDRESS": address}, 0, timeout_s=120)

    @contextmanager
    def beside(self, *words: str, **variables: str) -> Iterator[None]:
        """The same, while the block runs; it is asked to end then, and has to."""
        command = [*from_outside(self.engine), sys.executable, *words]
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(variables), stdin=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            status = process.wait(60)
        assert status == 0

    def fluster(self, *words: str) -> Any:
        """What a command of `fluster` answers to the operator."""
        program = "from fluster.cli import main; main()"
        answer = self.outside("-c", program, *words, "--output", "json", user="operator")
        return json.loads(answer) if answer else None

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        labels = {_LABEL: self.name, **({"com.docker.compose.service": service} if service else {})}
        return [self.engine.client.inspect_container(each["Id"]) for each in self.engine.containers(**labels)]

    def left(self) -> list[str]:
        """The names of all that the engine has of it."""
        client, mine = self.engine.client, {"label": f"{_LABEL}={self.name}"}
        networks = [each["Name"] for each in client.networks(filters=mine)]
        volumes = [each["Name"] for each in client.volumes(filters=mine)["Volumes"] or ()]
        return [*(each["Name"] for each in self.containers()), *networks, *volumes]


def _run(command: list[str], variables: dict[str, str], status: int, *, timeout_s: float) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == status, f"{' '.join(command)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout if status == 0 else done.stderr


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}


def make_images(engine: Engine) -> None:
    """What docker-compose.yml names, unless the engine has it."""
    lines = [f"FROM {engine.image}", f"COPY ca.crt {_CA_FILE}"]
    variables = {
        "SSL_CERT_FILE": _CA_FILE,
        "PIP_CERT": _CA_FILE,
        "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    variables |= {name: os.environ[name] for name in _PACKAGE_VARIABLES if name in os.environ}
    lines += [f"ENV {name}={value}" for name, value in variables.items()]
    authorities = ssl.get_default_verify_paths().cafile or _CA_FILE
    _build(engine, f"{engine.image}-with-packages", lines, {"ca.crt": Path(authorities)})
    # As the official one that is built on Alpine: a shell and nc of busybox, and the server.
    binaries = {"busybox": Path(shutil.which("busybox") or "busybox"), "nats-server": find_binary()}
    lines = ["FROM scratch", "COPY busybox /bin/", "COPY nats-server /bin/"]
    lines += ['RUN ["/bin/busybox", "--install", "-s", "/bin"]', "ENV PATH=/bin"]
    _build(engine, "fluster-test-nats", lines, binaries)


def _build(engine: Engine, name: str, lines: list[str], files: dict[str, Path]) -> None:
    """The layers of the last time are used again as long as the same goes into them."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for inner, path in files.items():
            tar.add(path.resolve(), inner)
        dockerfile = tarfile.TarInfo("Dockerfile")
        text = "\n".join(lines).encode()
        dockerfile.size = len(text)
        tar.addfile(dockerfile, io.BytesIO(text))
    packed.seek(0)
    for said in engine.client.build(fileobj=packed, custom_context=True, tag=name, decode=True, rm=True):
        if "error" in said:
            raise AssertionError(f"{name} cannot be built: {said['error']}")
