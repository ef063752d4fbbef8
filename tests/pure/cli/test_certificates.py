"""The certificates of a cluster's servers, as files and by the commands that make them."""

from __future__ import annotations

import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fluster.cli.app import app
from fluster.cli.common.exit_codes import ExitCode
from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import CredentialsError, InvalidNameError
from fluster_bus.server_sections import members
from fluster_bus.trust.certificate_folder import CertificateFolder
from fluster_bus.trust.certificates import read_certificate

NOW = datetime.now(UTC)
YEAR = timedelta(days=365)
ENDS = "make another with `fluster credentials certificates --new-authority`"


def _run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["credentials", *words])
    return done.exit_code, done.stdout, done.stderr


def _end(file: Path) -> datetime:
    return read_certificate(file.read_text()).until


def test_the_commands_make_what_each_server_needs_and_nothing_else_leaves_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = "tls://bus-1.example.org,tls://bus-2.example.org:4000,tls://10.0.0.3"
    code, said, _ = _run("init", "--url", url)
    names = ["bus-1.example.org", "bus-2.example.org", "10.0.0.3"]
    assert (code, said.splitlines()) == (0, [f"authority/servers/{name}/nats-server.conf" for name in names])
    for name in names:
        folder = tmp_path / "authority/servers" / name
        assert sorted(each.name for each in folder.iterdir()) == ["ca.pem", "nats-server.conf", "server.pem"]
        assert [(folder / each).stat().st_mode & 0o777 for each in ("server.pem", "ca.pem")] == [0o600, 0o644]
        told = read_certificate((folder / "server.pem").read_text())
        assert told.hosts == (name,)
        assert timedelta(days=364) < told.until - NOW < timedelta(days=366)
        context = ssl.create_default_context(cadata=(folder / "ca.pem").read_text())
        context.load_cert_chain(folder / "server.pem")
    assert (tmp_path / "authority/ca-key.pem").stat().st_mode & 0o777 == 0o600
    assert _run("add", "client", "alice", "--namespace", "a")[0] == 0
    address = BusAddress.parse("alice.creds")
    assert (address.url.count("tls://"), address.ca) == (3, (tmp_path / "authority/ca.pem").read_text())
    before = {each: each.read_text() for each in tmp_path.rglob("*.pem")}
    assert _run("init")[0] == 0
    assert {each: each.read_text() for each in before} == before


def test_a_group_has_routes_that_are_encrypted_and_one_server_has_none(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    assert _run("init", "--authority", str(folder), "--url", "tls://a,tls://b,tls://c:4000")[0] == 0
    text = (folder / "servers/c/nats-server.conf").read_text()
    assert text.count("cert_file") == 2
    for line in (
        'server_name: "c"',
        'listen: "0.0.0.0:4000"',
        'listen: "0.0.0.0:6000"',
        '"tls://b:6222"',
        'ca_file: "/etc/nats/ca.pem"',
        "verify: true",
    ):
        assert line in text
    alone = tmp_path / "alone"
    said = _run("init", "--authority", str(alone), "--server-folder", "/srv/nats")[1]
    assert said == f"{alone}/servers/127.0.0.1/nats-server.conf\n"
    text = Path(said.strip()).read_text()
    assert "cluster {" not in text
    assert 'cert_file: "/srv/nats/server.pem"' in text


def test_servers_of_one_host_are_told_apart_by_their_ports() -> None:
    urls = BusAddress("tls://127.0.0.1:4222,tls://127.0.0.1:4223,tls://[::1]").servers
    assert [each.name for each in members(urls)] == ["127.0.0.1-4222", "127.0.0.1-4223", "--1"]
    assert [each.route for each in members(urls)][1:] == ["tls://127.0.0.1:6223", "tls://[::1]:6222"]


def test_passwords_come_with_a_certificate_for_the_names_in_the_compose_file(tmp_path: Path) -> None:
    assert _run("passwords", str(tmp_path), "--url", "tls://bus.example.org")[1].splitlines()[-1] == str(
        tmp_path / "servers/nats"
    )
    told = read_certificate((tmp_path / "servers/nats/server.pem").read_text())
    assert {"nats", "nats-3", "127.0.0.1", "bus.example.org"} <= set(told.hosts)
    address = BusAddress.parse(str(tmp_path / "client_default.json"))
    assert (address.url, address.ca) == ("tls://bus.example.org:4222", (tmp_path / "ca.pem").read_text())
    assert _run("certificates", "--authority", str(tmp_path))[0] == 0


def test_passwords_of_a_server_without_tls_stay_so(tmp_path: Path) -> None:
    for words in (("--url", "nats://bus"), ()):
        assert _run("passwords", str(tmp_path), *words)[0] == 0
        assert BusAddress.parse(str(tmp_path / "operator.json")).url == "nats://bus:4222"
    assert not list(tmp_path.rglob("*.pem"))


@pytest.mark.parametrize("command", ["init", "passwords"])
def test_who_does_not_encrypt_beyond_the_machine_is_warned(tmp_path: Path, command: str) -> None:
    place = (str(tmp_path),) if command == "passwords" else ("--authority", str(tmp_path))
    for url, is_warned in (("nats://bus", True), ("nats://127.0.0.1", False), ("tls://bus", False)):
        assert ("will not be encrypted" in _run(command, *place, "--url", url)[2]) is is_warned


def test_renewed_certificates_are_of_the_same_authority_for_the_same_hosts(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    first = folder.make("a", ["a", "::1"], now=NOW - YEAR + timedelta(days=7)) / "server.pem"
    second = folder.make("b", ["b"], now=NOW - YEAR - YEAR) / "server.pem"
    code, said, _ = _run("certificates", "--authority", str(tmp_path))
    rows = [line.split() for line in said.splitlines()]
    assert (code, [row[:2] for row in rows[2:]]) == (0, [["a", "ends"], ["b", "expired"]])
    authority, before = (tmp_path / "ca.pem").read_text(), second.read_text()
    assert _run("certificates", "--authority", str(tmp_path), "--renew", "--server", "a")[:2] == (
        0,
        f"{tmp_path}/servers/a\n",
    )
    assert read_certificate(first.read_text()).hosts == ("a", "::1")
    assert _end(first) - NOW > timedelta(days=364)
    assert second.read_text() == before
    assert _run("certificates", "--authority", str(tmp_path), "--renew")[1].count("\n") == 2
    assert _end(second) - NOW > timedelta(days=364)
    assert (tmp_path / "ca.pem").read_text() == authority == (second.parent / "ca.pem").read_text()


def test_an_authority_that_nears_its_end_is_told_and_another_is_made_beside_it(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    folder.make("a", ["a"], now=NOW - 9.5 * YEAR)
    code, _, said = _run("certificates", "--authority", str(tmp_path), "--renew")
    assert (code, ENDS in said) == (0, True)
    old, file = (tmp_path / "ca.pem").read_text(), tmp_path / "servers/a/server.pem"
    assert _end(file) == read_certificate(old).until  # and not later
    signed = file.read_text()
    code, said, told = _run("certificates", "--authority", str(tmp_path), "--new-authority")
    assert (code, ENDS in told) == (0, False)
    assert said.splitlines() == [str(tmp_path / "ca.pem"), str(tmp_path / "servers/a/ca.pem")]
    both = (tmp_path / "ca.pem").read_text()
    assert both.endswith(old)
    assert both.count("BEGIN CERTIFICATE") == 2
    assert (file.read_text(), (file.parent / "ca.pem").read_text()) == (signed, both)
    assert _run("certificates", "--authority", str(tmp_path), "--renew")[0] == 0
    assert _end(file) - NOW > timedelta(days=364)


def test_an_authority_that_has_ended_signs_nothing_and_goes_with_the_next_one(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    folder.make("a", ["a"], now=NOW - 11 * YEAR)
    with pytest.raises(CredentialsError, match=r"ca\.pem has expired: make another with .*--new-authority"):
        folder.renew()
    folder.renew_authority()
    assert (tmp_path / "ca.pem").read_text().count("BEGIN CERTIFICATE") == 1
    folder.renew()


def test_a_key_that_is_lost_or_damaged_is_told_and_not_shown(tmp_path: Path) -> None:
    folder = CertificateFolder(tmp_path)
    server, key = (folder.make("a", ["a"]) / "server.pem").read_text(), tmp_path / "ca-key.pem"
    whole, begin = key.read_text(), "-----BEGIN CERT"
    mixed = whole[: whole.index(begin)] + server[server.index(begin) :]
    for text, why in (
        (whole.replace("PRIVATE", "PUBLIC"), "is damaged: restore it"),
        (mixed, "a key of another certificate: restore it"),
        (None, "is lost, or was never here: restore it"),
    ):
        key.unlink()
        if text is not None:
            key.write_text(text)
        with pytest.raises(CredentialsError, match=why) as caught:
            folder.renew()
        assert "BEGIN" not in str(caught.value)
        key.touch()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--host", "a b"), "'a b' is not a host: give a name"),
        (("--host", "a", "--server", "../a"), "'../a' is not a name of a server"),
        (("--host", "a", "--renew"), "exclude each other"),
        (("--renew", "--server", "b"), "unknown server 'b': the servers are a"),
        (("--host", "a", "--server", "a/b"), "'a/b' is not a name of a server"),
    ],
)
def test_what_cannot_be_is_told(tmp_path: Path, words: tuple[str, ...], why: str) -> None:
    CertificateFolder(tmp_path).make("a", ["a"])
    code, _, said = _run("certificates", "--authority", str(tmp_path), *words)
    assert (code != 0, why in said) == (True, True), said


def test_a_folder_without_certificates_is_told(tmp_path: Path) -> None:
    code, _, said = _run("certificates", "--authority", str(tmp_path / "none"))
    assert (code, "no certificates are in the folder" in said) == (ExitCode.USAGE, True)
    assert not (tmp_path / "none").exists()
    assert "which server is it for?" in _run("certificates", "--authority", str(tmp_path), "--host", "a")[2]
    with pytest.raises(InvalidNameError, match="has no host"):
        CertificateFolder(tmp_path).make("a", [])


def test_the_library_is_imported_only_where_certificates_are_made() -> None:
    modules = "fluster.cli.app, fluster.cli.credentials, fluster.cli.certificates, fluster_bus.connection.bus, fluster_bus.trust.authority"
    script = f"import sys, {modules}; print('cryptography' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )
