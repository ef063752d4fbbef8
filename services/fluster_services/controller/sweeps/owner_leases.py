"""Which programs that own jobs live, judged by what is heard of them, on the controller's own clock.

A program speaks through a helper process that sees its end, however it comes. So its end is told, and only silence of the
helper itself, as when the machine is gone, lasts until the lease is over.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from fluster_bus.messages import Namespace

MAX_OWNERS = 10_000  # of a namespace
_REMEMBERED = 10_000  # of those of a namespace that have ended: what they submitted last may still be on its way


class Owner(NamedTuple):
    """A program that owns jobs of a namespace."""

    namespace: Namespace
    name: str


class OwnerLeases:
    """When each owner was last heard. Times are seconds of a monotonic clock."""

    def __init__(self, lease_s: float, *, most: int = MAX_OWNERS) -> None:
        self.lease_s = lease_s
        self._most = most
        self._heard_at: dict[Owner, float] = {}
        self._count: Counter[Namespace] = Counter()  # of those
        # {namespace: {owner: what was submitted last, by anybody, when its end was told; None until that is known}}
        self._ended: dict[Namespace, OrderedDict[Owner, int | None]] = {}

    def expect(self, owner: Owner, *, now: float) -> None:
        """A record names it: it has its full time to be heard."""
        if owner not in self._heard_at:
            self._heard_at[owner] = now
            self._count[owner.namespace] += 1

    def why_refused(self, owner: Owner) -> str | None:
        """Why nothing of that owner may be recorded; None when it may."""
        if owner in self._heard_at or self._count[owner.namespace] < self._most:
            return None
        return (
            f"{self._most:,} programs own jobs in namespace {owner.namespace!r}, and {owner.name!r} would be one more: "
            "end some of them, or submit with detached=True what is to outlive its program"
        )

    def on_heard(self, owner: Owner, *, now: float) -> None:
        """It lives. Of one that no record names nothing is noted."""
        if owner in self._heard_at:
            self._heard_at[owner] = now

    def on_end(self, owner: Owner) -> None:
        """It has ended, which it does once."""
        ended = self._ended.setdefault(owner.namespace, OrderedDict())
        ended.setdefault(owner)
        ended.move_to_end(owner)
        while len(ended) > _REMEMBERED:
            ended.popitem(last=False)

    def has_ended(self, owner: Owner) -> bool:
        return owner in self._ended.get(owner.namespace, ())

    def on_order(self, owner: Owner, last: int) -> None:
        """Of all submissions `last` is the newest. The first time that this is said of one that has ended counts."""
        ended = self._ended.get(owner.namespace)
        if ended is not None and owner in ended and ended[owner] is None:
            ended[owner] = last

    def may_come(self, owner: Owner, *, settled: int) -> bool:
        """Whether a submission of one that has ended may still be recorded; those before `settled` were, or were refused."""
        ended = self._ended.get(owner.namespace)
        return settled <= ((ended.get(owner) if ended is not None else None) or 0)

    def on_interruption(self, *, now: float) -> None:
        """The bus or the controller was away, so nothing could be heard: all have their full time again."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def forget(self, owner: Owner) -> None:
        """No record names it any longer."""
        if self._heard_at.pop(owner, None) is not None:
            self._count[owner.namespace] -= 1

    def over(self, *, now: float) -> dict[Owner, str]:
        """The owners whose jobs are to end, and why."""
        found = {}
        for owner, heard_at in self._heard_at.items():
            if self.has_ended(owner):
                found[owner] = f"the program that owns it, {owner.name}, has ended"
            elif now - heard_at >= self.lease_s:
                found[owner] = f"the program that owns it, {owner.name}, was not heard for {self.lease_s:g} s"
        return found
