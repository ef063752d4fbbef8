"""nats-servers with what `fluster credentials` made for them, and nothing else: one, or several as a group."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typer.testing import CliRunner

from fluster.cli.app import app
from fluster_bus.access.address import BusAddress
from fluster_bus.server_process import find_binary
from fluster_bus.server_sections import Member, members
from tests.waiting import wait_until


class EncryptedGroup:
    """The authority, the machines of its servers (a folder each), and the servers."""

    def __init__(self, folder: Path, servers: int) -> None:
        self.folder = folder
        self.authority = folder / "authority"
        url = ",".join(f"tls://127.0.0.1:{port}" for port in _free_ports(servers))
        self.members: list[Member] = members(url.split(","))
        self.run("init", "--url", url)
        self.servers: dict[str, subprocess.Popen[bytes]] = {}  # {name: what runs}
        for member in self.members:
            self.copy(member)
            self.start(member)

    def run(self, *words: str) -> str:
        """What a command of `fluster credentials` prints."""
        done = CliRunner().invoke(app, ["credentials", *words, "--authority", str(self.authority)])
        assert done.exit_code == 0, done.output
        return done.stdout

    def machine(self, member: Member) -> Path:
        return self.folder / f"machine-{member.name}"

    def copy(self, member: Member) -> None:
        """Have the server's machine have what is for it, at places of its own."""
        machine = self.machine(member)
        shutil.copytree(self.authority / "servers" / member.name, machine, dirs_exist_ok=True)
        file = machine / "nats-server.conf"
        text = file.read_text().replace('"/etc/nats/', f'"{machine}/').replace('"/data', f'"{machine}/data')
        file.write_text(text.replace('"0.0.0.0:', '"127.0.0.1:'))

    def start(self, member: Member) -> None:
        """Start it, and return when it listens."""
        machine = self.machine(member)
        with (machine / "log").open("ab") as log:
            words = [str(find_binary()), "--config", str(machine / "nats-server.conf")]
            self.servers[member.name] = subprocess.Popen(words, stderr=log)
        wait_until(lambda: self._listens(member.port), describe=lambda: self.log(member))

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def log(self, member: Member) -> str:
        return (self.machine(member) / "log").read_text()

    def reload(self, member: Member) -> None:
        """Have it read its files again, by the command of the server itself."""
        before = self.log(member).count("Reloaded server configuration")
        signalled = f"--signal=reload={self.servers[member.name].pid}"
        subprocess.run([str(find_binary()), signalled], check=True, capture_output=True)
        wait_until(lambda: self.log(member).count("Reloaded server configuration") > before)

    def kill(self, member: Member) -> None:
        self.servers[member.name].kill()
        self.servers.pop(member.name).wait()

    def credentials(self, role: str, name: str, *words: str) -> Path:
        file = self.folder / f"{name}.creds"
        self.run("add", role, name, "--file", str(file), *words)
        return file

    def address(self, file: Path, member: Member) -> BusAddress:
        """By that server alone."""
        known = BusAddress.parse(str(file))
        return BusAddress(f"tls://{member.host}:{member.port}", token=known.token, seed=known.seed, ca=known.ca)

    def shown_at_routes(self, member: Member, own: Path | None) -> bytes:
        """The certificate that it shows other servers, to one with the certificate in `own`; raises OSError if refused."""
        context = ssl.create_default_context(cafile=str(self.authority / "ca.pem"))
        if own is not None:
            context.load_cert_chain(own)
        with (
            socket.create_connection((member.host, member.route_port), 10) as plain,
            context.wrap_socket(plain, server_hostname=member.host) as connection,
        ):
            if not connection.recv(1):  # a refusal comes after the handshake
                raise ConnectionResetError
            return connection.getpeercert(binary_form=True) or b""

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
            server.wait()


def _free_ports(count: int) -> list[int]:
    """Those for clients, with which those of routes are free as well."""
    found: list[int] = []
    while len(found) < count:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
        if port > 60_000 or port in found or port - 2_000 in found or port + 2_000 in found:
            continue
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 2_000)):
            found.append(port)
    return found


@contextmanager
def encrypted_group(folder: Path, servers: int = 3) -> Iterator[EncryptedGroup]:
    group = EncryptedGroup(folder, servers)
    try:
        yield group
    finally:
        group.close()
