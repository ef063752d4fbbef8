"""The passwords of a cluster as files: made once, kept, and of no use to others."""

from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client

from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import AddressError, InvalidNameError
from fluster_bus.core.roles import Role, User
from fluster_bus.server_configuration import PASSWORDS_FILE, write_credentials
from fluster_bus.trust.authority import Authority
from fluster_services.daemon import address_from_environment
from fluster_services.settings import SettingError
from fluster_services.worker.presence.identity import job_address, served_namespaces, worker_id

NAMES = ["service", "worker", "gateway", "autoscaler", "operator", "client_default", "job_default"]


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
    assert len(lines) == 9
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
    found = job_address(SERVICE, JOB)
    assert (found.url, found.user) == (SERVICE.url, "job_default")
    assert f"FLUSTER_JOB_DEFAULT_PASSWORD={found.password}\n" in (tmp_path / PASSWORDS_FILE).read_text()


def test_or_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_PASSWORD", "p2")
    assert job_address(SERVICE, JOB) == BusAddress(SERVICE.url, "job_default", "p2")


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
        job_address(SERVICE, JOB)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.of_cluster(tmp_path / "authority")


def _issued(authority: Authority, role: Role, name: str, *namespaces: str) -> BusAddress:
    made = authority.issue(role, name, namespaces)
    return BusAddress("nats://bus", token=made.token, seed=made.seed)


def test_signed_credentials_are_a_file_of_their_owner_which_other_clients_read(
    tmp_path: Path, authority: Authority
) -> None:
    address, file = _issued(authority, Role.CLIENT, "alice", "a"), tmp_path / "alice.creds"
    address.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert BusAddress.parse(str(file)) == address
    assert SERVICE.with_credentials(file) == replace(address, url=SERVICE.url)
    client = Client()
    assert bytes(client._read_creds_user_jwt(str(file))).decode().strip() == address.token  # noqa: SLF001 - nats-py's own, which ours must agree with
    assert bytes(client._read_creds_user_nkey(str(file))).decode().strip() == address.seed  # noqa: SLF001 - nats-py's own, which ours must agree with
    assert BusAddress(**address.values()) == address
    file.write_text(file.read_text().replace("# fluster: ", "# "))
    with pytest.raises(AddressError, match=r"alice.creds names no server: .*set FLUSTER_CLUSTER_ADDRESS to a URL"):
        BusAddress.parse(str(file))
    for damaged in (file.read_text().replace("SEED", "SOIL"), file.read_text().replace("ey", "no")):
        file.write_text(damaged)
        with pytest.raises(AddressError, match=r"alice.creds"):
            SERVICE.with_credentials(file)


def test_signed_credentials_say_which_worker_it_is_and_of_which_namespaces(
    monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    for variable in ("FLUSTER_WORKER_ID", "FLUSTER_NAMESPACES"):
        monkeypatch.delenv(variable, raising=False)
    address = _issued(authority, Role.WORKER, "w1", "a", "b")
    assert (worker_id(address), served_namespaces(address)) == ("w1", ["a", "b"])
    assert served_namespaces(SERVICE) == ["default"]
    monkeypatch.setenv("FLUSTER_NAMESPACES", "b")
    assert served_namespaces(address) == ["b"]
    monkeypatch.setenv("FLUSTER_NAMESPACES", "b,c")
    with pytest.raises(SettingError, match=r"FLUSTER_NAMESPACES='b,c', but .* good for a, b: leave c out"):
        served_namespaces(address)
    monkeypatch.setenv("FLUSTER_WORKER_ID", "w2")
    with pytest.raises(SettingError, match=r"FLUSTER_WORKER_ID='w2', but .* of the worker 'w1'"):
        worker_id(address)


def test_jobs_get_signed_credentials_of_their_role_and_namespace_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    file = tmp_path / "job.creds"
    monkeypatch.setenv("FLUSTER_JOB_DEFAULT_CREDENTIALS", str(file))
    good = _issued(authority, Role.JOB, "job-default", "default")
    good.save(file)
    assert job_address(SERVICE, JOB) == replace(good, url=SERVICE.url)
    for role, name, namespaces in (
        (Role.WORKER, "w1", ("default",)),
        (Role.JOB, "job-other", ("other",)),
    ):
        _issued(authority, role, name, *namespaces).save(file)
        with pytest.raises(SettingError, match=f"is of '{name}', role {role} in .*role job in 'default' alone"):
            job_address(SERVICE, JOB)


def test_a_daemon_without_an_address_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLUSTER_CLUSTER_ADDRESS", "FLUSTER_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match="FLUSTER_CLUSTER_ADDRESS is not set"):
        address_from_environment()
