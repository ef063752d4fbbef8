"""Keys, tokens and the authority's folder, without a server."""

from __future__ import annotations

import base64
import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.access.address import BusAddress
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.access.signed_credentials import read_user_token
from fluster_bus.core.errors import CredentialsError, InvalidNameError
from fluster_bus.core.roles import Permissions, Role
from fluster_bus.trust.authority import Authority
from fluster_bus.trust.signer import Identity
from fluster_bus.trust.tokens import user_token

PERMISSIONS = {Role.CLIENT: Permissions(("fluster.{{tag(ns)}}.>",), ("_INBOX.>",))}
HOUR_S = 3600.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", PERMISSIONS, [])


@pytest.mark.parametrize("kind", list(KeyKind))
def test_a_key_is_the_same_again_from_its_seed(kind: KeyKind) -> None:
    key = Key.generate(kind)
    again = Key(key.seed)
    assert (again.public, again.kind, again.sign(b"data")) == (key.public, kind, key.sign(b"data"))
    assert key.public.startswith(kind)
    assert key.seed not in repr(key)


@pytest.mark.parametrize("text", ["", "S", "SUAé", "x" * 58, "SU" + "=" * 60])
def test_what_is_not_a_seed_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(CredentialsError, match="damaged") as caught:
        Key(text)
    assert not text or text not in str(caught.value)


def test_a_damaged_seed_is_refused_and_not_shown() -> None:
    seed = Key.generate(KeyKind.USER).seed
    for damaged in (seed[:-4], seed[1:], seed[:10]):
        with pytest.raises(CredentialsError, match="damaged") as caught:
            Key(damaged)
        assert damaged not in str(caught.value)


def test_a_token_says_who_the_user_is(authority: Authority) -> None:
    credentials = authority.issue(Role.CLIENT, "alice", ["default", "Prod"], lifetime_s=HOUR_S)
    claims = read_user_token(credentials.token)
    assert claims.public == Key(credentials.seed).public
    assert claims.expires_at is not None
    assert claims.expires_at - claims.issued_at == HOUR_S
    assert Identity.of_token(credentials.token) == Identity(Role.CLIENT, "alice", ("default", "Prod"))
    assert credentials.seed not in repr(credentials)


@given(st.text() | st.binary().map(lambda data: data.decode("latin1")))
def test_what_is_not_a_token_is_refused(text: str) -> None:
    with pytest.raises(CredentialsError):
        read_user_token(text)


def test_a_token_of_what_is_not_a_user_is_refused() -> None:
    account = Key.generate(KeyKind.ACCOUNT)
    token = user_token(account, account.public, name="alice", account=account.public)
    with pytest.raises(CredentialsError, match="is not a user"):
        read_user_token(token)


def test_an_authority_is_the_same_again_in_its_folder(authority: Authority, tmp_path: Path) -> None:
    authority.issue(Role.CLIENT, "alice", ["default"])
    again = Authority(tmp_path / "authority", PERMISSIONS, [])
    assert again.signer(Role.CLIENT).key.public == authority.signer(Role.CLIENT).key.public
    assert [each.name for each in again.issued()] == ["alice"]
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "authority").iterdir()}
    assert modes == {0o600}


def test_a_name_is_given_once_until_it_is_revoked(authority: Authority) -> None:
    first = authority.issue(Role.CLIENT, "alice", ["default"])
    with pytest.raises(CredentialsError, match="'alice' exists already"):
        authority.issue(Role.CLIENT, "alice", ["default"])
    (revoked,) = authority.revoke("alice")
    assert revoked.public == Key(first.seed).public
    second = authority.issue(Role.CLIENT, "alice", ["default"])
    assert second.seed != first.seed
    with pytest.raises(CredentialsError, match=r"unknown user 'bob': the users are alice"):
        authority.revoke("bob")


@pytest.mark.parametrize(("name", "namespace"), [("a.b", "default"), ("alice", "*"), ("alice", "sys"), ("", "default")])
def test_names_that_could_widen_a_subject_are_refused(authority: Authority, name: str, namespace: str) -> None:
    with pytest.raises(InvalidNameError):
        authority.issue(Role.CLIENT, name, [namespace])
    assert authority.issued() == []


def test_a_damaged_folder_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    Authority(folder, PERMISSIONS, [])
    (folder / "operator.seed").write_text(Key.generate(KeyKind.USER).seed)
    with pytest.raises(CredentialsError, match=r"operator\.seed holds a key of another kind"):
        Authority(folder, PERMISSIONS, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(CredentialsError, match="cannot be used"):
        Authority(tmp_path / "file", PERMISSIONS, [])


def test_a_key_that_is_lost_is_not_made_anew(authority: Authority, tmp_path: Path) -> None:
    seed = tmp_path / "authority" / "role-client.seed"
    kept = seed.read_text()
    seed.unlink()
    with pytest.raises(CredentialsError, match=r"role-client\.seed is lost: restore it from a backup"):
        Authority(tmp_path / "authority", PERMISSIONS, [])
    assert not seed.exists()
    seed.write_text(Key.generate(KeyKind.ACCOUNT).seed)
    with pytest.raises(CredentialsError, match=r"role-client\.seed holds another key than the one that was made there"):
        Authority(tmp_path / "authority", PERMISSIONS, [])
    seed.write_text(kept)
    assert Authority(tmp_path / "authority", PERMISSIONS, []).signer(Role.CLIENT).key.seed == kept.strip()


def test_the_last_key_that_is_lost_leaves_no_empty_folder(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "authority" / "operator.seed").unlink()
    assert Authority.is_there(tmp_path / "authority")


def test_a_newer_version_adds_the_keys_of_its_roles(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "authority" / "keys.json").unlink()  # as an earlier version left it
    older = authority.signer(Role.CLIENT).key.public
    newer = Authority(tmp_path / "authority", {**PERMISSIONS, Role.GATEWAY: PERMISSIONS[Role.CLIENT]}, [])
    assert newer.signer(Role.CLIENT).key.public == older
    assert newer.signer(Role.GATEWAY).key.public != older


def test_a_damaged_list_of_keys_is_said_so(authority: Authority, tmp_path: Path) -> None:
    for damaged in ("{", "[]"):
        (tmp_path / "authority" / "keys.json").write_text(damaged)
        with pytest.raises(CredentialsError, match=r"keys\.json is damaged: restore it from a backup"):
            Authority(tmp_path / "authority", PERMISSIONS, [])


def test_a_damaged_register_is_said_so(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "authority" / "issued.json").write_text(json.dumps([{"name": "alice"}]))
    with pytest.raises(CredentialsError, match="restore it from a backup"):
        authority.issued()


def _issue(folder: Path, number: int) -> None:
    Authority(folder, PERMISSIONS, []).issue(Role.CLIENT, f"user-{number}", ["default"])


def test_two_processes_may_issue_at_once(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_issue, args=(tmp_path / "authority", number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    issued = Authority(tmp_path / "authority", PERMISSIONS, []).issued()
    assert sorted(each.name for each in issued) == [f"user-{number}" for number in range(4)]


def test_a_key_that_was_not_issued_here_is_revoked_by_itself(authority: Authority) -> None:
    stranger = Key.generate(KeyKind.USER).public
    (revoked,) = authority.revoke(stranger)
    assert revoked.public == stranger
    bodies = [token.split(".")[1] for token in authority.account_tokens().values()]
    claims = [json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))) for body in bodies]
    assert [stranger in each["nats"]["revocations"] for each in claims] == [
        each["name"] == "cluster" for each in claims
    ]
    with pytest.raises(CredentialsError, match="is revoked, or has expired"):
        authority.revoke(stranger)
    for wrong in (
        stranger[:-1],
        stranger[:-1] + ("A" if stranger[-1] != "A" else "B"),
        Key.generate(KeyKind.ACCOUNT).public,
    ):
        with pytest.raises(CredentialsError, match="unknown user"):
            authority.revoke(wrong)


def test_who_serves_several_namespaces_hears_replies_as_one_of_the_clusters_own(tmp_path: Path) -> None:
    authority = Authority.of_cluster(tmp_path)
    for role, name, inbox in (
        (Role.OPERATOR, "me", "_INBOX.sys.me"),
        (Role.CLIENT, "alice", "_INBOX.default.alice"),
        (Role.WORKER, "w1", "_INBOX.sys.worker:w1"),
        (Role.GATEWAY, "gw", "_INBOX.sys.gw"),
        (Role.AUTOSCALER, "scaler", "_INBOX.sys.scaler"),
    ):
        made = authority.issue(role, name, ("default", "b") if role.is_confined else ())
        assert BusAddress("nats://h", token=made.token, seed=made.seed).inbox_prefix() == inbox
