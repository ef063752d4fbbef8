"""The passwords of a cluster as files: made once, kept, and of no use to others."""

from pathlib import Path

import pytest

from fluster_bus.address import BusAddress
from fluster_bus.credentials import PASSWORDS_FILE, write_credentials
from fluster_bus.errors import AddressError, InvalidNameError
from fluster_bus.roles import Role, User
from fluster_services.daemon import address_from_environment
from fluster_services.settings import SettingError
from fluster_services.worker.__main__ import _job_address

NAMES = ["service", "worker", "operator", "client_default", "job_default"]


def test_each_user_has_a_file_and_the_server_has_all_passwords(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "credentials"
    files = write_credentials(folder)
    assert [file.name for file in files] == [PASSWORDS_FILE, *(f"{name}.json" for name in NAMES)]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    addresses = [BusAddress.parse(str(file)) for file in files[1:]]
    assert [address.user for address in addresses] == NAMES
    assert {address.url for address in addresses} == {"nats://127.0.0.1:4222"}
    assert len({address.password for address in addresses}) == len(NAMES)
    assert files[0].read_text().splitlines() == [
        f"FLUSTER_{address.user.upper()}_PASSWORD={address.password}" for address in addresses if address.user
    ]


def test_the_servers_configuration_has_the_same_variables(tmp_path: Path) -> None:

    lines = write_credentials(tmp_path, ["team-a", "b"])[0].read_text().splitlines()
    from fluster_bus.server_configuration import production_configuration

    text = production_configuration(["team-a", "b"])
    assert len(lines) == 7
    assert all(f"password: ${line.split('=')[0]}\n" in text for line in lines)


def test_what_is_there_stays(tmp_path: Path) -> None:
    before = {file: (file.read_text(), file.stat().st_ino) for file in write_credentials(tmp_path)[1:]}
    after = write_credentials(tmp_path, ["default", "more"])
    assert {file: (file.read_text(), file.stat().st_ino) for file in after[1:] if file in before} == before
    assert "FLUSTER_JOB_MORE_PASSWORD=" in after[0].read_text()


def test_another_url_changes_nothing_else(tmp_path: Path) -> None:
    passwords, service, *_ = write_credentials(tmp_path)
    before = passwords.read_text()
    for url in ("tls://bus.example.org", None):
        write_credentials(tmp_path, url=url)
        assert BusAddress.parse(str(service)).url == "tls://bus.example.org:4222"
    assert passwords.read_text() == before


def test_a_file_of_somebody_else_is_not_taken(tmp_path: Path) -> None:
    service, operator = write_credentials(tmp_path)[1:3]
    service.write_bytes(operator.read_bytes())
    with pytest.raises(AddressError, match=r"service.json is not of 'service'"):
        write_credentials(tmp_path)


@pytest.mark.parametrize("password", ["1234", "with blank", "p$HOME", "p;id", "p\nX=1"])
def test_a_password_that_the_server_or_a_shell_would_read_otherwise_is_refused(tmp_path: Path, password: str) -> None:
    BusAddress("nats://h", "service", password).save(tmp_path / "service.json")
    with pytest.raises(AddressError, match="remove it to have a new one made") as caught:
        write_credentials(tmp_path)
    assert password not in str(caught.value)


def test_namespaces_that_are_none_or_share_a_variable_are_refused(tmp_path: Path) -> None:
    for namespaces in (["sys"], ["a-b", "a_b"]):
        with pytest.raises(InvalidNameError):
            write_credentials(tmp_path / "folder", namespaces)
    assert not (tmp_path / "folder").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AddressError, match=r"file/below cannot be made: Not a directory"):
        write_credentials(tmp_path / "file" / "below")


# What daemons make of them

JOB = User(Role.JOB, "default")
SERVICE = BusAddress("nats://bus", "service", "p1")


def test_a_worker_takes_its_jobs_credentials_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_credentials(tmp_path)
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_CREDENTIALS", str(tmp_path / "job_default.json"))
    found = _job_address(SERVICE, JOB)
    assert (found.url, found.user) == (SERVICE.url, "job_default")
    assert f"FLUSTER_JOB_DEFAULT_PASSWORD={found.password}\n" in (tmp_path / PASSWORDS_FILE).read_text()


def test_or_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_PASSWORD", "p2")
    assert _job_address(SERVICE, JOB) == BusAddress(SERVICE.url, "job_default", "p2")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("operator.json", "is of 'operator', and jobs are 'job_default'"),
        ("none.json", "FLUSTER_JOB_DEFAULT_CREDENTIALS: .*none.json does not exist"),
        ("", "neither FLUSTER_JOB_DEFAULT_CREDENTIALS nor FLUSTER_JOB_DEFAULT_PASSWORD is set"),
    ],
)
def test_jobs_never_get_the_rights_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    write_credentials(tmp_path)
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_CREDENTIALS", str(tmp_path / name) if name else "")
    monkeypatch.delenv("FLUSTER_JOB_DEFAULT_PASSWORD", raising=False)
    with pytest.raises(SettingError, match=why):
        _job_address(SERVICE, JOB)


def test_a_daemon_without_an_address_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLUSTER_CLUSTER_ADDRESS", "FLUSTER_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="FLUSTER_CLUSTER_ADDRESS is not set"):
        address_from_environment()
