"""The text of join tokens, and the files of those who join and of those who admit them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.access.address import BusAddress
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.core.errors import CredentialsError, InvalidNameError
from fluster_bus.core.roles import Role
from fluster_bus.messages.workers import JoinReply
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.join_tokens import JoinedFolder, JoinToken
from fluster_bus.trust.signer import read_signing_keys, write_signing_keys


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.of_cluster(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def token(authority: Authority, tmp_path: Path) -> JoinToken:
    made = authority.issue(Role.JOIN, f"join-{tmp_path.name}", lifetime_s=60)
    return JoinToken(BusAddress("tls://bus:4000", token=made.token, seed=made.seed), ("a", "b"))


def test_a_token_is_one_line_and_the_same_again(token: JoinToken, tmp_path: Path) -> None:
    text = token.to_text()
    assert len(text.split()) == 1
    assert JoinToken.parse(f" {text}\n") == token
    file = tmp_path / "join.token"
    file.touch(0o600)
    file.write_text(f"{text}\n")
    assert JoinToken.parse(str(file)) == token
    assert (token.address.seed or "") not in repr(token)
    file.chmod(0o644)
    with pytest.raises(CredentialsError, match=r"others may read the join token in .* \(mode 644\)"):
        JoinToken.parse(str(file))


@given(st.text() | st.binary().map(lambda data: data.decode("latin1")))
def test_what_is_no_token_is_refused_and_not_shown(text: str) -> None:
    for given_text in (text, f"fluster-join-{text}"):
        with pytest.raises(CredentialsError):
            JoinToken.parse(given_text)


def test_a_damaged_token_is_refused_and_not_shown(token: JoinToken) -> None:
    text = token.to_text()
    for damaged in (text[:-40], text[:60], text.upper()):
        with pytest.raises(CredentialsError) as caught:
            JoinToken.parse(damaged)
        assert damaged not in str(caught.value)


def test_a_token_is_of_no_namespace_on_the_bus(authority: Authority) -> None:
    with pytest.raises(InvalidNameError, match="of the whole cluster"):
        authority.issue(Role.JOIN, "join-1", ["a"])


def test_who_asks_again_has_the_same_keys_in_files_of_its_own(tmp_path: Path) -> None:
    folder = JoinedFolder(tmp_path / "joined")
    worker, jobs = folder.keys(["a"])
    again, more = folder.keys(["a", "b"])
    assert (again.seed, more["a"].seed) == (worker.seed, jobs["a"].seed)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "joined").iterdir()} == {0o600}
    assert (tmp_path / "joined").stat().st_mode & 0o777 == 0o700
    for damaged in ("{", "[]", '{"worker": 1}'):
        (tmp_path / "joined" / "keys.json").write_text(damaged)
        with pytest.raises(CredentialsError, match=r"remove .*joined, and join anew"):
            folder.keys(["a"])


def test_what_was_signed_is_kept_for_the_keys_that_were_sent(
    authority: Authority, token: JoinToken, tmp_path: Path
) -> None:
    folder = JoinedFolder(tmp_path / "joined")
    worker, jobs = folder.keys(["a"])
    signed = authority.signer(Role.WORKER).sign(worker.public, "w1", ["a"])
    job = authority.signer(Role.JOB).sign(jobs["a"].public, "job-w1", ["a"])
    strange = authority.signer(Role.JOB).sign(Key.generate(KeyKind.USER).public, "job-w1", ["a"])
    for reply in (JoinReply(worker=signed, jobs={}), JoinReply(worker=signed, jobs={"a": strange})):
        with pytest.raises(CredentialsError, match="join again"):
            folder.keep(token.address, reply, worker, jobs)
        assert folder.job_files() == {}
    folder.keep(token.address, JoinReply(worker=signed, jobs={"a": job}), worker, jobs)
    address = BusAddress.parse(str(folder.worker_file))
    assert (address.url, address.user, address.namespaces) == ("tls://bus:4000", "w1", ("a",))
    assert BusAddress.parse(str(folder.job_files()["a"])).user == "job-w1"
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "joined").iterdir()} == {0o600}


def test_controllers_are_given_the_keys_of_two_roles_alone(authority: Authority, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    write_signing_keys(authority, file)
    assert file.stat().st_mode & 0o777 == 0o600
    signers = read_signing_keys(file)
    assert set(signers) == {Role.WORKER, Role.JOB}
    signed = signers[Role.WORKER].sign(Key.generate(KeyKind.USER).public, "w1", ["a"])
    assert read_user_token(signed).issuer == authority.signer(Role.WORKER).key.public
    others = {str(role): authority.signer(role).key.seed for role in Role if role not in signers}
    assert not any(seed in file.read_text() for seed in others.values())


@pytest.mark.parametrize("text", ["", "{}", '{"account": "A", "keys": {"worker": "S"}}'], ids=["empty", "none", "one"])
def test_a_file_that_holds_no_signing_keys_is_said_so(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(CredentialsError, match="holds no signing keys: take the file that `fluster token keys` wrote"):
        read_signing_keys(file)


def test_signing_keys_of_others_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    with pytest.raises(CredentialsError, match="cannot be read"):
        read_signing_keys(file)
    seed = Key.generate(KeyKind.USER).seed
    file.touch(0o600)
    file.write_text(json.dumps({"account": "A", "keys": {"worker": seed, "job": seed}}))
    with pytest.raises(CredentialsError, match="keys of another kind"):
        read_signing_keys(file)
    file.chmod(0o640)
    with pytest.raises(CredentialsError, match="others may read the signing keys"):
        read_signing_keys(file)


def test_an_operator_of_a_minute_is_not_in_the_register(authority: Authority) -> None:
    before = authority.issued()
    claims = read_user_token(authority.operator_credentials().token)
    assert claims.expires_at is not None
    assert claims.expires_at <= time.time() + 61
    assert authority.issued() == before
