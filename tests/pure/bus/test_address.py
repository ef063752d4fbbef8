"""What names a bus: every form that is taken, every form that is refused, and no password in any error."""

from pathlib import Path

import pytest

from fluster_bus.access.address import BusAddress
from fluster_bus.core.errors import AddressError, NoAddressError


def test_a_url_with_credentials_is_taken_apart_and_put_together() -> None:
    address = BusAddress.parse("nats://job_default:s3cret@10.0.0.7:4333")
    assert (address.servers, address.user, address.password) == (["nats://10.0.0.7:4333"], "job_default", "s3cret")
    assert address.inbox_prefix() == "_INBOX.default.job_default"
    assert BusAddress.parse(address.to_url()) == address


@pytest.mark.parametrize(
    ("text", "servers"),
    [
        ("nats://localhost", ["nats://localhost:4222"]),
        ("  tls://bus.example.org:4443/ ", ["tls://bus.example.org:4443"]),
        ("nats://[::1]", ["nats://[::1]:4222"]),
        ("nats://[::1]:9,nats://b", ["nats://[::1]:9", "nats://b:4222"]),
        ("nats://a:1,b:2,c", ["nats://a:1", "nats://b:2", "nats://c:4222"]),
    ],
)
def test_servers(text: str, servers: list[str]) -> None:
    address = BusAddress.parse(text)
    assert address.servers == servers
    assert (address.user, address.inbox_prefix()) == (None, "_INBOX.sys.anybody")
    assert BusAddress.parse(address.to_url()) == address


@pytest.mark.parametrize("text", ["nats://u:p@a:1,b:2", "nats://u:p@a:1,nats://u:p@b:2"])
def test_several_servers_have_one_user(text: str) -> None:
    address = BusAddress.parse(text)
    assert (address.servers, address.user, address.password) == (["nats://a:1", "nats://b:2"], "u", "p")
    assert address.to_url() == "nats://u:p@a:1,nats://u:p@b:2"


@pytest.mark.parametrize("password", ["a@b", "a/b:c", "a,b", "ä%41 #?", "x" * 300])
def test_any_password_survives_the_url(password: str) -> None:
    address = BusAddress("nats://h:1,nats://i:2", "u", password)
    assert BusAddress.parse(address.to_url()) == address


def test_the_password_is_never_shown() -> None:
    address = BusAddress("nats://h", "u", "s3cret")
    assert str(address) == "nats://u@h:4222"
    assert "s3cret" not in repr(address)


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("", "''"),
        ("http://u:s3cret@h", "http://***@h"),
        ("u:s3cret@h:4222", "***@h:4222"),
        ("nats://u:s3cret@", "nats://***@"),
        ("nats://u:s3cret@h:port", "nats://***@h:***"),
        ("nats://u:s3cret@h:99999999", "nats://***@h:***"),
        ("nats://u:s3cret", "nats://u:***"),
        ("nats://s3cret@h", "nats://***@h"),
        ("nats://u:@h", "nats://***@h"),
        ("nats://u:s3c,ret@h", "nats://***@h"),
        ("nats://u:s3cret@h,nats://v:s3cret@i", "nats://***@i"),
        ("nats://a b:4222", "nats://a b:4222"),
        ("nats://u.v:s3cret@h", "nats://***@h"),
        ("nats://h:1,tls://h:2", "nats://h:1,tls://h:2"),
        ("nats://h:0", "nats://h:0"),
        ("localhost:4222", "localhost:4222"),
    ],
)
def test_what_is_no_address_is_quoted_without_its_password(text: str, quoted: str) -> None:
    with pytest.raises(AddressError) as refused:
        BusAddress.parse(text)
    error: BaseException | None = refused.value
    assert quoted in str(error)
    while error is not None:  # a traceback shows the causes as well
        assert "s3c" not in str(error)
        error = error.__cause__


def test_user_and_password_come_together() -> None:
    with pytest.raises(AddressError, match="only one of user and password"):
        BusAddress("nats://h", "u")


# ---- files ----------------------------------------------------------------------------------------------

ADDRESS = BusAddress("nats://h:1", "u", "s3cret")


def test_a_saved_address_is_its_owners_alone_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    path.write_text("older")
    path.chmod(0o644)
    ADDRESS.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert BusAddress.parse(str(path)) == ADDRESS
    assert list(tmp_path.iterdir()) == [path]


def test_an_address_without_credentials_is_saved_too(tmp_path: Path) -> None:
    path = tmp_path / "file"
    BusAddress("nats://h:1").save(path)
    assert BusAddress.parse(str(path)) == BusAddress("nats://h:1")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "file"
    ADDRESS.save(path)
    path.chmod(mode)
    with pytest.raises(AddressError, match=f"others may read .*chmod 600 {path}"):
        BusAddress.parse(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json s3cret", "holds no credentials"),
        ("[]", "holds no credentials"),
        ('{"url": 3}', "holds no credentials"),
        ('{"user": "u", "password": "s3cret"}', "names no server"),
        ('{"url": "nats://h", "user": "u"}', "lacks the user or the password"),
        ('{"url": "ftp://u:s3cret@h"}', "invalid address"),
    ],
)
def test_a_file_that_holds_no_address_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(AddressError, match=message) as refused:
        BusAddress.parse(str(path))
    assert "s3cret" not in str(refused.value)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(AddressError, match=r"absent' is neither a URL \(nats://.*\) nor a file"):
        BusAddress.parse(str(tmp_path / "absent"))
    with pytest.raises(AddressError, match=f"credentials in {tmp_path} cannot be read"):
        BusAddress.parse(str(tmp_path))
    with pytest.raises(AddressError, match=r"cannot be written to .*absent/file"):
        ADDRESS.save(tmp_path / "absent" / "file")


# ---- the environment ------------------------------------------------------------------------------------


def test_the_environment_names_a_url_or_a_file(tmp_path: Path) -> None:
    ADDRESS.save(tmp_path / "file")
    for environ in (
        {"FLUSTER_CLUSTER_ADDRESS": ADDRESS.to_url()},
        {"FLUSTER_CLUSTER_ADDRESS": str(tmp_path / "file")},
        {"FLUSTER_CREDENTIALS": str(tmp_path / "file")},
        {"FLUSTER_CLUSTER_ADDRESS": "nats://h:1", "FLUSTER_CREDENTIALS": str(tmp_path / "file")},
        {"FLUSTER_CLUSTER_ADDRESS": "nats://other:one@h:1", "FLUSTER_CREDENTIALS": str(tmp_path / "file")},
    ):
        assert BusAddress.from_environment(environ) == ADDRESS


def test_the_url_of_the_environment_beats_that_of_the_file(tmp_path: Path) -> None:
    ADDRESS.save(tmp_path / "file")
    address = BusAddress.from_environment(
        {"FLUSTER_CLUSTER_ADDRESS": "nats://elsewhere", "FLUSTER_CREDENTIALS": str(tmp_path / "file")}
    )
    assert (address.url, address.user) == ("nats://elsewhere:4222", "u")


def test_an_environment_that_names_nothing_or_nonsense_says_which_variable(tmp_path: Path) -> None:
    with pytest.raises(NoAddressError, match=r"FLUSTER_CLUSTER_ADDRESS is not set.*fluster up"):
        BusAddress.from_environment({"FLUSTER_CLUSTER_ADDRESS": " "})
    with pytest.raises(AddressError, match=r"^FLUSTER_CLUSTER_ADDRESS: invalid address 'nats://\*\*\*@h:\*\*\*'"):
        BusAddress.from_environment({"FLUSTER_CLUSTER_ADDRESS": "nats://u:s3cret@h:x"})
    with pytest.raises(AddressError, match=r"^FLUSTER_CREDENTIALS: .*absent"):
        BusAddress.from_environment(
            {"FLUSTER_CLUSTER_ADDRESS": "nats://h", "FLUSTER_CREDENTIALS": str(tmp_path / "absent")}
        )


def test_servers_that_others_tell_of_are_added_once_and_what_is_none_is_left_out() -> None:
    address = BusAddress("tls://here:4223", "u", "p")
    more = address.with_servers(["there:4222", "here:4223", "[::1]:4224", "bad host:1", "a:b:c", "", "x:99999999"])
    assert more.servers == ["tls://here:4223", "tls://there:4222", "tls://[::1]:4224"]
    assert (more.user, more.password) == ("u", "p")
    assert address.with_servers(["here:4223"]) is address
    assert len(address.with_servers(f"h{number}:4222" for number in range(1000)).servers) == 32
