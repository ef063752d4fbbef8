"""Which programs that own jobs live, judged by what is heard of them, on the controller's own clock.

A program speaks through a helper process that sees its end, however it comes. So its end is told, and only silence of the
helper itself, as when the machine is gone, lasts until the lease is over.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from fluster_bus.messages import Namespace

_REMEMBERED = 10_000  # of those that have ended: what they submitted last may still be on its way


class Owner(NamedTuple):
    """A program that owns jobs of a namespace."""

    namespace: Namespace
    name: str


class OwnerLeases:
    """When each owner was last heard. Times are seconds of a monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._heard_at: dict[Owner, float] = {}
        # {owner: what was submitted last, by anybody, when its end was told; None until that is known}
        self._ended: OrderedDict[Owner, int | None] = OrderedDict()

    def expect(self, owner: Owner, *, now: float) -> None:
        """A record names it: it has its full time to be heard."""
        self._heard_at.setdefault(owner, now)

    def on_heard(self, owner: Owner, *, now: float) -> None:
        """It lives. Of one that no record names nothing is noted."""
        if owner in self._heard_at:
            self._heard_at[owner] = now

    def on_end(self, owner: Owner) -> None:
        """It has ended, which it does once."""
        self._ended.setdefault(owner)
        self._ended.move_to_end(owner)
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, owner: Owner) -> bool:
        return owner in self._ended

    def on_order(self, owner: Owner, last: int) -> None:
        """Of all submissions `last` is the newest. The first time that this is said of one that has ended counts."""
        if owner in self._ended and self._ended[owner] is None:
            self._ended[owner] = last

    def may_come(self, owner: Owner, *, settled: int) -> bool:
        """Whether a submission of one that has ended may still be recorded; those before `settled` were, or were refused."""
        return settled <= (self._ended.get(owner) or 0)

    def on_interruption(self, *, now: float) -> None:
        """The bus or the controller was away, so nothing could be heard: all have their full time again."""
        self._heard_at = dict.fromkeys(self._heard_at, now)

    def forget(self, owner: Owner) -> None:
        """No record names it any longer."""
        self._heard_at.pop(owner, None)

    def over(self, *, now: float) -> dict[Owner, str]:
        """The owners whose jobs are to end, and why."""
        found = {}
        for owner, heard_at in self._heard_at.items():
            if owner in self._ended:
                found[owner] = f"the program that owns it, {owner.name}, has ended"
            elif now - heard_at >= self.lease_s:
                found[owner] = f"the program that owns it, {owner.name}, was not heard for {self.lease_s:g} s"
        return found
