"""How a pool chooses the member for a call.

Pass one to `ActorPool(…, policy=…)`, by name or as an object; `pool.on(key)` chooses by a key instead.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from fluster.actors.protocol.members import Member
from fluster_bus.core.names import near

_MOST_KEYS = 10_000  # whose members are remembered


class Policy(Protocol):
    """Chooses among members."""

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:
        """One of `members`, of which there is at least one. `out` counts the calls that each endpoint has."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:  # noqa: ARG002
        self._turn += 1
        return members[(self._turn - 1) % len(members)]


class LeastOutstanding:
    """The member with the fewest calls of this client that are not answered yet; of several, one after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:
        first = self._turn % len(members)
        self._turn += 1
        return min((*members[first:], *members[:first]), key=lambda each: out.get(each.endpoint_id, 0))


class Random:
    """Any of them: what many clients that each make few calls had best do."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:  # noqa: ARG002
        return self._random.choice(members)


class ByKey:
    """For each key always the same member while it lives, for every client; a member that ends gives up its keys alone.

    Rendezvous hashing: each member draws a number for the key, and the highest has it. So who joins takes its share of
    the keys from all others, and nothing else moves.
    """

    def __init__(self) -> None:
        # (members, {key: its owner among them}); one value, as threads ask that know of different members
        self._known: tuple[Sequence[Member], dict[bytes, Member]] = ((), {})

    def for_key(self, key: object) -> Policy:
        """The policy for calls of that key. Raises TypeError for what is not the same in each process."""
        return _OfKey(self, key_bytes(key))

    def owner(self, key: bytes, members: Sequence[Member]) -> Member:
        """The member that has the key."""
        known, owners = self._known
        if members is not known or len(owners) >= _MOST_KEYS:
            owners = {}
            self._known = members, owners
        owner = owners.get(key)
        if owner is None:
            owner = owners[key] = max(members, key=lambda each: _draw(each.endpoint_id, key))
        return owner


class _OfKey:
    __slots__ = ("_by_key", "_key")

    def __init__(self, by_key: ByKey, key: bytes) -> None:
        self._by_key = by_key
        self._key = key

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:  # noqa: ARG002
        return self._by_key.owner(self._key, members)


# They ask nothing of the calls that are out, and may be asked by any thread.
UNCOUNTED = (RoundRobin, Random, _OfKey)


def key_bytes(key: object) -> bytes:
    """The key in the form in which keys are compared. Raises TypeError for what is not the same in each process."""
    if not _is_stable(key):
        raise TypeError(f"on({key!r}): a key is a text, bytes, an int, a bool, or a tuple of these")
    return repr(key).encode(errors="surrogatepass")


def _is_stable(key: object) -> bool:
    if type(key) is tuple:
        return all(map(_is_stable, cast("tuple[object, ...]", key)))
    return type(key) in (str, bytes, int, bool)


def _draw(endpoint_id: str, key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8, key=endpoint_id.encode()[:64]).digest()


_BY_NAME: Mapping[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
    "least": LeastOutstanding,
    "random": Random,
}


def policy_of(policy: str | Policy) -> Policy:
    """The policy of that name, or the one that was given. Raises ValueError, TypeError."""
    if isinstance(policy, str):
        if policy not in _BY_NAME:
            raise ValueError(f"policy={policy!r} is not known{near(policy, _BY_NAME)}")
        return _BY_NAME[policy]()
    if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
        raise TypeError(
            f"policy={policy!r}: give {', '.join(map(repr, _BY_NAME))}, or an object with a method `choose`"
        )
    return policy if type(policy) in _BY_NAME.values() else _Watched(policy)


class _Watched:
    """A policy of a user's, which may return anything."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        return repr(self._policy)

    def choose(self, members: Sequence[Member], out: Mapping[str, int]) -> Member:
        """A member. Raises TypeError for anything else, also for one that has just ended."""
        chosen = self._policy.choose(members, out)
        if chosen not in members:
            raise TypeError(
                f"the policy {self._policy!r} chose {chosen!r}: return one of the members that it was given"
            )
        return chosen
