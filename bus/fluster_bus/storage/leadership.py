"""Who leads, as one of those who may sees it. Pure: told what happened and when by its own monotonic clock, it says what to do.

The leader writes the seat, a record on the bus, again and again, each time only if no other did. The others count from
when *they* saw it written: one that has seen nothing new for the whole lease tries to write the seat at the revision that it
saw last, so of several that try one succeeds, and none while the leader still writes. No clock is compared with another.

            the seat is free, or silent for the lease
    FOLLOWER ────────────────────────────────────────► CANDIDATE ── its write was taken ──► LEADER
       ▲                                                   │                                  │
       └────────── another one's write was seen ───────────┘               another one's write was seen: DEPOSED

A leader that cannot know whether it still leads, because its last write was *sent* a lease ago, does nothing until it does
know. That is never longer than the others wait, since they saw the write after it was sent.
"""

from __future__ import annotations

from enum import Enum, auto


class LeadershipState(Enum):
    """What a process is that may lead."""

    FOLLOWER = auto()
    CANDIDATE = auto()  # it may try to take the seat
    LEADER = auto()
    DEPOSED = auto()  # it led: whatever it holds is out of date


class Leadership:
    """One candidate's view of the seat. Times are seconds of its monotonic clock.

    `instance` is its own mark in the seat. `succeeds` is the holder whose seat it may take at once, having been started
    in that one's place; None when it waits like any other.
    """

    def __init__(self, *, instance: str, lease_s: float, succeeds: str | None = None) -> None:
        self._instance = instance
        self._lease_s = lease_s
        self._succeeds = succeeds
        self._revision: int | None = None  # of the seat as it was seen last, 0 when it is free; None before it was seen
        self._seen_at = 0.0
        self._seen_lease_s = lease_s  # of the holder that was seen last
        self._is_open = False  # no right is violated when it is taken
        self._sent_at: float | None = None  # when what made it leader was sent
        self._deposed = False

    # ---- what happened ----------------------------------------------------------------------------------

    def on_seat(self, revision: int, *, instance: str, holder: str, now: float, lease_s: float | None = None) -> None:
        """The seat was seen as `holder` wrote it, who counts on it for `lease_s` seconds; None: for as long as this one would."""
        if self._is_old(revision):
            return
        self._revision, self._seen_at = revision, now
        self._seen_lease_s = self._lease_s if lease_s is None else lease_s
        # Its own write, of which it did not hear that it was taken, is one to be made again.
        self._is_open = instance == self._instance or holder == self._succeeds
        if instance != self._instance and self._sent_at is not None:
            self._deposed = True

    def on_free(self, revision: int, *, now: float) -> None:
        """The seat was seen empty; `revision` is that of its removal, 0 when it never was taken."""
        if self._is_old(revision):
            return
        self._revision, self._seen_at, self._is_open = revision, now, True
        if self._sent_at is not None:
            self._deposed = True

    def _is_old(self, revision: int) -> bool:
        return self._revision is not None and revision <= self._revision

    def on_written(self, revision: int, *, sent_at: float) -> None:
        """Its own write was taken: it leads from when it was sent."""
        if self._deposed:
            return
        self._sent_at = sent_at if self._sent_at is None else max(sent_at, self._sent_at)
        if self._revision is None or revision > self._revision:
            self._revision, self._seen_at, self._is_open = revision, sent_at, False

    def on_interruption(self, *, now: float) -> None:
        """The bus or this process was away, so no leader could be heard: it has its whole lease again."""
        self._seen_at = now

    # ---- what follows -----------------------------------------------------------------------------------

    def state(self, now: float) -> LeadershipState:
        if self._deposed:
            return LeadershipState.DEPOSED
        if self._sent_at is not None:
            return LeadershipState.LEADER
        if self._revision is None:
            return LeadershipState.FOLLOWER
        silent = now - self._seen_at >= self._seen_lease_s
        return LeadershipState.CANDIDATE if self._is_open or silent else LeadershipState.FOLLOWER

    def is_sure(self, now: float) -> bool:
        """True while no other can have become leader by waiting."""
        return not self._deposed and self._sent_at is not None and now - self._sent_at < self._lease_s

    @property
    def revision(self) -> int:
        """Where the next write of the seat expects it."""
        return self._revision or 0

    def pause_s(self, now: float) -> float:
        """How long nothing is to be done unless something happens."""
        match self.state(now):
            case LeadershipState.LEADER:
                assert self._sent_at is not None  # noqa: S101
                return max(0.0, self._sent_at + self._lease_s / RENEWALS_PER_LEASE - now)
            case LeadershipState.FOLLOWER:
                return self._lease_s if self._revision is None else max(0.0, self._seen_at + self._seen_lease_s - now)
            case _:
                return 0.0


RENEWALS_PER_LEASE = 3
