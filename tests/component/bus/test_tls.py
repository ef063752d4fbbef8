"""Encrypted connections to real servers, with certificates that another program made: good ones, and what should fail."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from fluster.cli.app import app
from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import AddressError, BusError, UntrustedServerError
from fluster_bus.direct.line import Dialler, Line
from fluster_bus.server_process import free_port
from fluster_bus.trust.certificate_folder import CertificateFolder
from fluster_services import daemon
from tests.component.nats_servers import configured
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

USER = "authorization { user: me, password: secret }\n"
YEAR = timedelta(days=365)


@dataclass(frozen=True)
class Site:
    """Who signs certificates, and where they are put."""

    authority: trustme.CA
    folder: Path

    @property
    def ca(self) -> str:
        return str(self.authority.cert_pem.bytes(), "utf-8")

    def address(self, port: int, *, host: str = "127.0.0.1", scheme: str = "tls") -> BusAddress:
        return BusAddress(f"{scheme}://{host}:{port}", "me", "secret", ca=self.ca)

    def block(self, *hosts: str, after: datetime | None = None, before: datetime | None = None) -> str:
        """Configuration of a server whose certificate is for `hosts`."""
        made = self.authority.issue_cert(*hosts, not_after=after, not_before=before)
        made.private_key_and_cert_chain_pem.write_to_path(str(self.folder / "server.pem"))
        return f'cert_file: "{self.folder}/server.pem", key_file: "{self.folder}/server.pem"'

    @contextmanager
    def server(
        self, *hosts: str, after: datetime | None = None, before: datetime | None = None, at: int = -1
    ) -> Iterator[int]:
        """A server whose certificate is for `hosts`; its port."""
        block = self.block(*hosts, after=after, before=before)
        with configured(self.folder, f"tls {{ {block} }}\n{USER}", at) as port:
            yield port


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(trustme.CA(), tmp_path)


async def _both_ways(address: BusAddress) -> list[str]:
    """What connections by the loop and by a thread of its own raise."""
    with pytest.raises(BusError) as caught:
        await Bus.connect(address, name="test")
    (made,) = Dialler(address, "test").attempts()
    assert isinstance(made, UntrustedServerError)
    assert isinstance(caught.value, UntrustedServerError)
    return [str(caught.value), str(made)]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_connections_are_encrypted_by_the_authority_in_the_address(site: Site, host: str) -> None:
    with site.server(host) as port:
        address = site.address(port, host=host)
        (line,) = Dialler(address, "test").attempts()
        assert isinstance(line, Line)
        bus = await Bus.connect(address, name="test")
        heard: list[bytes] = []
        await bus.subscribe("test", lambda message: heard.append(message.data))
        data = [bytes([number]) * 900_000 for number in range(20)]
        for each in data:
            await bus.publish("test", each)
        await bus.flush()
        assert heard == data
        await bus.close()


async def test_an_address_that_says_nothing_of_it_is_encrypted_where_the_server_wants_it(site: Site) -> None:
    with site.server("127.0.0.1") as port:
        bus = await Bus.connect(site.address(port, scheme="nats"), name="test")
        await bus.close()


@pytest.mark.parametrize(
    ("hosts", "age", "told"),
    [
        pytest.param(["127.0.0.1"], -YEAR, "has expired: renew it there", id="expired"),
        pytest.param(["127.0.0.1"], YEAR, "is not valid yet: compare the clocks", id="early"),
        pytest.param(["10.1.2.3"], None, "is for other hosts: address it by", id="other-address"),
        pytest.param(["bus.example.org"], None, "have one made that is for 127.0.0.1, too", id="other-name"),
    ],
)
async def test_what_is_wrong_with_a_certificate_is_told_with_the_remedy(
    site: Site, hosts: list[str], age: timedelta | None, told: str
) -> None:
    now = datetime.now(UTC)
    middle = now + (age or timedelta())
    with site.server(*hosts, before=middle - YEAR / 2, after=middle + YEAR / 2) as port:
        for text in await _both_ways(site.address(port)):
            assert f"the certificate of the server at tls://127.0.0.1:{port}" in text
            assert told in text


@pytest.mark.parametrize("ca", [trustme.CA().cert_pem.bytes().decode(), None], ids=["another", "none"])
async def test_an_unknown_authority_is_told_with_the_remedy(site: Site, ca: str | None) -> None:
    with site.server("127.0.0.1") as port:
        for text in await _both_ways(BusAddress(f"tls://127.0.0.1:{port}", "me", "secret", ca=ca)):
            assert "is signed by an authority that is not known here: name the file of" in text


@pytest.mark.parametrize(
    ("hosts", "age", "told"),
    [
        pytest.param(["127.0.0.1"], -2 * YEAR, "has expired: renew it there", id="expired"),
        pytest.param(["127.0.0.1"], YEAR, "is not valid yet: compare the clocks", id="early"),
        pytest.param(["10.1.2.3"], timedelta(), "is for other hosts: address it by", id="other-host"),
        pytest.param(["127.0.0.1"], None, "is signed by an authority that is not known here", id="other-authority"),
    ],
)
async def test_certificates_of_the_command_are_refused_with_the_remedy_by_clients_commands_and_daemons(
    tmp_path: Path, hosts: list[str], age: timedelta | None, told: str
) -> None:
    certificates = CertificateFolder(tmp_path)
    made = certificates.make("a", hosts, now=datetime.now(UTC) + (age or timedelta()))
    if age is None:
        certificates = CertificateFolder(tmp_path / "other")
        certificates.make("a", hosts)
    ca = (tmp_path / ("ca.pem" if age is not None else "other/ca.pem")).read_text()
    files = f'cert_file: "{made}/server.pem", key_file: "{made}/server.pem"'
    with configured(tmp_path, f"tls {{ {files} }}\n{USER}") as port:
        address = BusAddress(f"tls://127.0.0.1:{port}", "me", "secret", ca=ca)
        address.save(tmp_path / "me.json")
        for text in await _both_ways(address):
            assert told in text
        commanded = await asyncio.to_thread(CliRunner().invoke, app, ["--address", str(tmp_path / "me.json"), "ps"])
        assert commanded.exit_code != 0
        (line,) = commanded.stderr.splitlines()
        assert told in line
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fluster_services.controller"),
            env={**os.environ, "FLUSTER_CLUSTER_ADDRESS": str(tmp_path / "me.json")},
            stderr=asyncio.subprocess.PIPE,
        )
        assert started.stderr is not None
        assert told in (await started.stderr.readline()).decode()
        started.kill()
        await started.communicate()


async def test_a_daemon_warns_of_a_certificate_that_ends_soon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates = CertificateFolder(tmp_path)
    for age, warned in ((timedelta(days=340), 1), (timedelta(), 0)):
        caplog.clear()
        made = certificates.make("a", ["127.0.0.1"], now=datetime.now(UTC) - age)
        files = f'cert_file: "{made}/server.pem", key_file: "{made}/server.pem"'
        with configured(tmp_path, f"tls {{ {files} }}\n{USER}") as port:
            ca = (tmp_path / "ca.pem").read_text()
            address = BusAddress(f"tls://127.0.0.1:{port}", "me", "secret", ca=ca)
            bus = await daemon.connect([address], "a daemon", asyncio.Event())
            assert bus is not None
            await bus.close()
        assert caplog.text.count("the certificate of the server ends on") == warned


async def test_credentials_are_not_sent_to_a_server_that_does_not_encrypt(site: Site) -> None:
    """As one that stands in another's place, or says so in its words."""
    heard: list[bytes] = []

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.14.0","max_payload":1048576,"headers":true}\r\n')
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        address = site.address(port)
        with pytest.raises(UntrustedServerError, match="does not encrypt connections: give it a certificate"):
            await Bus.connect(address, name="test")
        made = await asyncio.to_thread(lambda: list(Dialler(address, "test").attempts()))
        assert isinstance(made[0], UntrustedServerError)
        await wait_until_async(lambda: len(heard) > 1)
    assert set(heard) == {b""}


async def test_of_several_servers_those_with_good_certificates_are_used(site: Site, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Site(trustme.CA(), tmp_path / "other")
    with site.server("127.0.0.1") as good, other.server("127.0.0.1") as bad:
        url = f"tls://127.0.0.1:{bad},tls://127.0.0.1:{good}"
        bus = await Bus.connect(BusAddress(url, "me", "secret", ca=site.ca), name="test")
        await bus.close()


async def test_a_connection_that_cannot_be_made_anew_says_why_once(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """And comes back once the certificate is good."""
    caplog.set_level(logging.WARNING)
    now = datetime.now(UTC)
    with site.server("127.0.0.1", at=free_port()) as port:
        bus = await Bus.connect(site.address(port), name="test")
    back = asyncio.Event()
    bus.on_reconnect(back.set)
    with site.server("127.0.0.1", before=now - YEAR, after=now - YEAR / 2, at=port):
        await wait_until_async(lambda: "has expired" in caplog.text)
    with site.server("127.0.0.1", at=port):
        await asyncio.wait_for(back.wait(), 30)
        assert len([each for each in caplog.records if "has expired" in each.message]) == 1
        await bus.close()


def test_an_address_file_names_the_authority(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = site.address(4222)
    address.save(tmp_path / "me.json")
    assert BusAddress.parse(str(tmp_path / "me.json")) == address
    (tmp_path / "ca.pem").write_text(site.ca)
    (tmp_path / "hand.json").write_text(
        '{"url": "tls://127.0.0.1", "user": "me", "password": "secret", "ca": "ca.pem"}'
    )
    (tmp_path / "hand.json").chmod(0o600)
    assert BusAddress.parse(str(tmp_path / "hand.json")) == address
    monkeypatch.setenv("FLUSTER_CA", str(tmp_path / "ca.pem"))
    assert BusAddress.parse("tls://me:secret@127.0.0.1") == address
    for name in ("hand.json", "absent.pem"):
        monkeypatch.setenv("FLUSTER_CA", str(tmp_path / name))
        with pytest.raises(AddressError, match=rf"^FLUSTER_CA: the .*{name}"):
            BusAddress.parse("tls://me:secret@127.0.0.1")


async def test_damaged_certificates_of_an_authority_are_told(site: Site) -> None:
    damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    with pytest.raises(AddressError, match="certificates of the servers' authority are damaged"):
        await Bus.connect(BusAddress("tls://127.0.0.1:1", ca=damaged), name="test")
