"""The keys of a cluster: they issue the tokens of its users, and take them back.

Only the folder of the authority can do both. It belongs on the machine of those who run the cluster, and into a backup;
the servers need none of it. A service that admits workers gets the keys of the roles `worker` and `job` alone.

Servers learn from it lines of their configuration, which name no user, and changed accounts while they run.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from fluster_bus import grants
from fluster_bus.access.address import DEFAULT_PORT, BusAddress, write_private
from fluster_bus.access.keys import Key, KeyKind, is_public_key
from fluster_bus.access.tls import CA_FILE, read_certificates
from fluster_bus.core import server_subjects, subjects
from fluster_bus.core.errors import AddressError, CredentialsError
from fluster_bus.core.roles import Permissions, Role
from fluster_bus.grants import STORE_EXPORTS, STORE_IMPORTS, Export
from fluster_bus.server_configuration import production_server
from fluster_bus.server_sections import Member, group, quoted
from fluster_bus.trust.signer import Identity, Signer
from fluster_bus.trust.tokens import Scope, account_token, operator_token, user_token

OPERATOR_KEY = "operator"
_LIST_FILE = "keys.json"


class KeyFolder:
    """The seeds in a folder, and the list of those that were made there. Its owner lets one process use it at a time.

    A key that was made once and is lost is never made anew: users that it signed for would be refused.
    """

    def __init__(self, folder: Path) -> None:
        """Those in `folder`. Raises CredentialsError, OSError."""
        self._folder = folder
        self._list = folder / _LIST_FILE
        self._known: dict[str, str] = {}  # {name: public key}
        if self._list.exists():
            try:
                self._known = {str(name): str(public) for name, public in json.loads(self._list.read_bytes()).items()}
            except (ValueError, AttributeError) as error:
                raise CredentialsError(f"the file {self._list} is damaged: restore it from a backup") from error

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Whether the keys of an authority lie in `folder`, or did."""
        return any((folder / name).exists() for name in (f"{OPERATOR_KEY}.seed", _LIST_FILE))

    def key(self, name: str, kind: KeyKind) -> Key:
        """The key of that name; one that was never there is made. Raises CredentialsError, OSError."""
        file = self._folder / f"{name}.seed"
        if not file.exists():
            if name in self._known:
                raise CredentialsError(
                    f"the key {file} is lost: restore it from a backup; without one make a new authority in another folder, and "
                    "give servers and users what it issues"
                )
            write_private(file, Key.generate(kind).seed + "\n")
        key = Key(file.read_text(encoding="ascii"))
        if key.kind is not kind:
            raise CredentialsError(f"the file {file} holds a key of another kind: restore it from a backup")
        if self._known.get(name, key.public) != key.public:
            raise CredentialsError(f"the file {file} holds another key than the one that was made there: restore it")
        if name not in self._known:
            self._known[name] = key.public
            write_private(self._list, json.dumps(self._known, indent=1) + "\n")
        return key


SYSTEM_ACCOUNT, STORE_ACCOUNT, CLUSTER_ACCOUNT = "system", "store", "cluster"
_NAME = "authority"  # as a user
_REGISTER_FILE, _LOCK_FILE = "issued.json", "lock"
UNKNOWN_ROLE = "-"  # of keys that were not issued here
_URL_FILE = "url"
_DEFAULT_URL = f"nats://127.0.0.1:{DEFAULT_PORT}"
_MAX_REVOKED = 10_000  # of tokens that have not expired: they all stand in one message to the servers
# Servers refuse tokens of a revoked key that were signed until then: for good, also where another signs a new one.
_FOR_GOOD = 1 << 40


@dataclass(frozen=True)
class Issued:
    """One user to which a token was issued. Times are Unix times in seconds."""

    name: str
    role: str
    namespaces: tuple[str, ...]
    public: str
    issued_at: int
    expires_at: int | None = None
    revoked_at: int | None = None

    def is_good(self, now: float) -> bool:
        """True while the server takes it."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class Credentials:
    """What a user shows to the server: its token, and the seed of the key by which it proves to be the one meant."""

    token: str
    seed: str

    def __repr__(self) -> str:
        return f"Credentials({Identity.of_token(self.token).name})"


class Authority:
    """The authority whose keys lie in a folder. Two processes may use it at once."""

    def __init__(
        self,
        folder: Path,
        permissions: Mapping[Role, Permissions],
        flows: Sequence[Export],
        uploads: Sequence[Export] = (),
    ) -> None:
        """The authority in `folder`; keys that were never there are made, and those that were and are lost are an error.

        `permissions` are those of each role, with `{{tag(ns)}}` for a namespace and `{{name()}}` for the user's name;
        `flows` are the subjects of the account with the streams that users may use, `uploads` those of the users' account that the
        one with the streams takes in. Raises CredentialsError.
        """
        self._folder = folder
        self._permissions = dict(permissions)
        self._flows = tuple(flows)
        self._uploads = tuple(uploads)
        with _explained(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                keys = KeyFolder(folder)
                self._operator = keys.key(OPERATOR_KEY, KeyKind.OPERATOR)
                self._accounts = {
                    name: keys.key(name, KeyKind.ACCOUNT) for name in (SYSTEM_ACCOUNT, STORE_ACCOUNT, CLUSTER_ACCOUNT)
                }
                self._roles = {role: keys.key(f"role-{role}", KeyKind.ACCOUNT) for role in self._permissions}

    @staticmethod
    def is_there(folder: Path) -> bool:
        """Whether the keys of an authority lie in `folder`."""
        return KeyFolder.is_there(folder)

    @classmethod
    def of_cluster(cls, folder: Path) -> Self:
        """The authority in `folder`, where keys that were never there are made, with the roles of Fluster, each with what it may do in this version."""
        return cls(folder, {role: grants.scoped(role) for role in Role}, STORE_EXPORTS, STORE_IMPORTS)

    # ---- users ------------------------------------------------------------------------------------------

    def signer(self, role: Role) -> Signer:
        """What issues tokens of one role: to be handed to a service that does so."""
        return Signer(role, self._roles[role], self._accounts[CLUSTER_ACCOUNT].public)

    def issue(
        self, role: Role, name: str, namespaces: Sequence[str] = (), *, lifetime_s: float | None = None
    ) -> Credentials:
        """A new user. Raises CredentialsError while there is one of that name, InvalidNameError."""
        key, now = Key.generate(KeyKind.USER), int(time.time())
        expires_at = None if lifetime_s is None else now + max(1, int(lifetime_s))
        token = self.signer(role).sign(key.public, name, namespaces, expires_at=expires_at)
        issued = Issued(name, str(role), tuple(namespaces), key.public, now, expires_at)
        with _explained(self._folder), self._locked():
            register = self._read()
            if any(each.name == name and each.is_good(now) for each in register):
                raise CredentialsError(
                    f"the user {name!r} exists already: choose another name, or revoke that one first"
                )
            self._write([*register, issued])
        return Credentials(token, key.seed)

    def issued(self) -> list[Issued]:
        """All users that were issued here, those revoked and expired among them, the oldest first."""
        with _explained(self._folder), self._locked():
            return self._read()

    def revoke(self, name: str) -> list[Issued]:
        """Revoke the credentials of that name, or of that public key; servers learn it from the new `account_tokens`.

        A key may be one to which another who signs for this cluster issued a token. Returns the users that were revoked.
        Raises CredentialsError when no user has that name.
        """
        now = int(time.time())
        with _explained(self._folder), self._locked():
            register = self._read()
            meant = [each for each in register if each.is_good(now) and name in (each.name, each.public)]
            if not meant and is_public_key(name, KeyKind.USER):
                if any(each.public == name for each in register):
                    raise CredentialsError(f"the user with the key {name} is revoked, or has expired")
                meant = [Issued(name, UNKNOWN_ROLE, (), name, now)]
                register = [*register, *meant]
            if not meant:
                raise CredentialsError(f"unknown user {name!r}: {_known(register, now)}")
            return self._revoke(register, meant, now)

    def revoke_joined(self, users: Sequence[Issued]) -> list[Issued]:
        """Revoke users that another who signs for this cluster issued; those that are revoked already stay so. Raises CredentialsError."""
        with _explained(self._folder), self._locked():
            register = self._read()
            known = {each.public for each in register}
            fresh = [each for each in users if each.public not in known]
            return self._revoke([*register, *fresh], fresh, int(time.time()))

    def _revoke(self, register: list[Issued], meant: Sequence[Issued], now: int) -> list[Issued]:
        changed = [replace(each, revoked_at=now) if each in meant else each for each in register]
        if len(_revoked(changed, now)) > _MAX_REVOKED:
            raise CredentialsError(
                f"{_MAX_REVOKED} users are revoked whose credentials do not expire: make a new authority, or issue with a lifetime"
            )
        self._write(changed)
        return [each for each in changed if each.public in {one.public for one in meant}]

    @property
    def url(self) -> str:
        """Where users reach the servers."""
        with _explained(self._folder):
            file = self._folder / _URL_FILE
            return BusAddress(file.read_text(encoding="utf-8").strip()).url if file.exists() else _DEFAULT_URL

    @property
    def ca(self) -> str | None:
        """The certificates by which the servers are known, where there are some."""
        file = self._folder / CA_FILE
        return read_certificates(file) if file.exists() else None

    def address(self, shown: Credentials, url: str | None = None) -> BusAddress:
        """Where the servers are, for the user who has these credentials. Raises AddressError."""
        return BusAddress(url or self.url, token=shown.token, seed=shown.seed, ca=self.ca).with_ca_of(os.environ)

    def reach_servers_at(self, url: str) -> None:
        """Have `url` say so from now on. Raises CredentialsError."""
        with _explained(self._folder), self._locked():
            write_private(self._folder / _URL_FILE, BusAddress(url).url + "\n")

    # ---- for the servers --------------------------------------------------------------------------------

    @property
    def system_account(self) -> str:
        """The public key of the account of the servers' own traffic."""
        return self._accounts[SYSTEM_ACCOUNT].public

    def operator_token(self) -> str:
        """What servers trust."""
        return operator_token(self._operator, name="fluster", system_account=self.system_account)

    def account_tokens(self) -> dict[str, str]:
        """{public key of an account: its token} as they are now."""
        store, cluster = self._accounts[STORE_ACCOUNT].public, self._accounts[CLUSTER_ACCOUNT].public
        revoked = _revoked(self.issued(), time.time())
        scopes = [Scope(key.public, str(role), self._permissions[role]) for role, key in self._roles.items()]
        return {
            self.system_account: account_token(self._operator, self.system_account, name=SYSTEM_ACCOUNT),
            store: account_token(
                self._operator,
                store,
                name=STORE_ACCOUNT,
                exports=self._flows,
                imports=dict.fromkeys(self._uploads, cluster),
                has_streams=True,
            ),
            cluster: account_token(
                self._operator,
                cluster,
                name=CLUSTER_ACCOUNT,
                exports=self._uploads,
                imports=dict.fromkeys(self._flows, store),
                scopes=scopes,
                revoked=revoked,
            ),
        }

    def system_credentials(self, lifetime_s: float = 60) -> Credentials:
        """A user of the system account, by which servers are given new tokens of accounts. It is short-lived."""
        key, inbox = Key.generate(KeyKind.USER), subjects.below(subjects.inbox_prefix(_NAME))
        token = user_token(
            self._accounts[SYSTEM_ACCOUNT],
            key.public,
            name=_NAME,
            account=self.system_account,
            permissions=Permissions(publish=(server_subjects.CLAIMS_REQUESTS, inbox), subscribe=(inbox,)),
            expires_at=int(time.time() + lifetime_s),
        )
        return Credentials(token, key.seed)

    def operator_credentials(self, lifetime_s: float = 60) -> Credentials:
        """An operator of the cluster, by which what is changed here is sent to its controllers. It is short-lived."""
        key = Key.generate(KeyKind.USER)
        token = self.signer(Role.OPERATOR).sign(key.public, _NAME, (), expires_at=int(time.time() + lifetime_s))
        return Credentials(token, key.seed)

    # ---- in the folder ----------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> list[Issued]:
        file = self._folder / _REGISTER_FILE
        if not file.exists():
            return []
        try:
            return [
                Issued(**{**each, "namespaces": tuple(each["namespaces"])}) for each in json.loads(file.read_bytes())
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise CredentialsError(f"the file {file} is damaged: restore it from a backup") from error

    def _write(self, register: Sequence[Issued]) -> None:
        write_private(self._folder / _REGISTER_FILE, json.dumps([asdict(each) for each in register], indent=1) + "\n")


def _revoked(register: Sequence[Issued], now: float) -> dict[str, int]:
    """{public key: until when what is signed for it is refused} of those that a server would take otherwise."""
    return {
        each.public: _FOR_GOOD
        for each in register
        if each.revoked_at is not None and replace(each, revoked_at=None).is_good(now)
    }


def _known(register: Sequence[Issued], now: float) -> str:
    known = sorted({each.name for each in register if each.is_good(now)})
    return f"the users are {', '.join(known[:20])}" if known else "no user was issued yet, or all have expired"


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except AddressError as error:
        raise CredentialsError(str(error)) from error
    except OSError as error:
        raise CredentialsError(f"the authority's folder {folder} cannot be used: {error.strerror}") from error


def signed_configuration(authority: Authority, store: Path) -> str:
    """The whole configuration of a production server with its streams below `store`. It holds no secret."""
    port = int(authority.url.split(",")[0].rpartition(":")[2])
    return _HEADER + production_server(port, str(store), None) + trust_configuration(authority, store / "accounts")


def encrypted_configuration(
    authority: Authority, store: Path, member: Member, members: Sequence[Member], folder: Path
) -> str:
    """The same of one of a cluster's servers, or of the only one: what belongs to it lies in `folder` there."""
    routes = group([each.route for each in members], member.route_port, str(folder)) if len(members) > 1 else ""
    server = production_server(member.port, str(store), str(folder), name=member.name)
    return "".join([_HEADER, server, routes, trust_configuration(authority, store / "accounts")])


_HEADER = """\
# A production server. Made by `fluster credentials init`; nothing here is secret. Users come and go without a change of this file.

"""


def trust_configuration(authority: Authority, folder: Path) -> str:
    """Lines for nats-server: the operator, and the accounts as they are now; `folder` keeps those that come later."""
    preload = [f"  {account}: {quoted(token)}" for account, token in authority.account_tokens().items()]
    return "\n".join(
        [
            f"operator: {quoted(authority.operator_token())}",
            f"system_account: {authority.system_account}",
            # Servers of a group compare what they were given so often: one that was away soon refuses users that are revoked.
            f'resolver: {{ type: full, dir: {quoted(str(folder))}, allow_delete: false, interval: "5s" }}',
            "resolver_preload: {",
            *preload,
            "}",
            "",
        ]
    )


_OK = 200


async def publish_accounts(authority: Authority, url: str) -> None:
    """Have the servers at `url` take the accounts as they are now: users that are revoked are cut off, what a role may applies.

    A server of the group that is away learns it from the others when it is back. Raises CredentialsError when they trust
    another authority, ConnectError.
    """
    from fluster_bus.connection.bus import Bus  # with nats-py, which writing a configuration does not need

    bus = await Bus.connect(authority.address(authority.system_credentials(), url), name="fluster credentials")
    try:
        for token in authority.account_tokens().values():
            answer = json.loads((await bus.request(server_subjects.CLAIMS_UPDATE, token.encode())).data)
            done = answer.get("data") or {}
            if done.get("code") != _OK:
                reason = answer.get("error") or done
                raise CredentialsError(f"the server at {url} does not take the accounts of this authority: {reason}")
    finally:
        await bus.close()
