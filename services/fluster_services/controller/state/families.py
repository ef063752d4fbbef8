"""Who launched whom: of each job at once whether it, or anything that it launched, has not ended.

Jobs name the one that launched them, so a tenant makes as many of them, and as deep, as it likes. No step here looks at more
than the line of ancestors, whose length is bounded where jobs are taken in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

MAX_DEPTH = 100  # jobs above one another

Key = TypeVar("Key", bound=Hashable)


class Families(Generic[Key]):
    """The jobs that are known, by their keys. One that nothing is known of has ended."""

    def __init__(self) -> None:
        self._launched_by: dict[Key, tuple[Key, int | None]] = {}  # {job: who launched it, and which task of that}
        self._children: dict[Key, set[Key]] = {}
        self._unfinished: set[Key] = set()
        # {job: {its task: the children that this launched of which something has not ended}}
        self._live: dict[Key, dict[int | None, dict[Key, None]]] = {}

    def put(self, key: Key, *, parent: Key | None, task: int | None, is_finished: bool) -> None:
        """A job is known, or has changed; `task` of the parent has launched it."""
        link = (parent, task) if parent is not None else None
        if self._launched_by.get(key) != link:
            self._unlink(key)
        if link is not None:
            self._launched_by[key] = link
            self._children.setdefault(link[0], set()).add(key)
        if is_finished:
            self._unfinished.discard(key)
        else:
            self._unfinished.add(key)
        self._tell_ancestors(key)

    def remove(self, key: Key) -> None:
        """A job is no longer known. What it launched has no parent then."""
        self._unfinished.discard(key)
        self._live.pop(key, None)
        for child in self._children.pop(key, ()):
            self._launched_by.pop(child, None)
        self._tell_ancestors(key)
        self._unlink(key)

    def _unlink(self, key: Key) -> None:
        link = self._launched_by.pop(key, None)
        if link is None:
            return
        parent, task = link
        siblings = self._children[parent]
        siblings.discard(key)
        if not siblings:
            del self._children[parent]
        if self._note(parent, task, key, is_live=False):
            self._tell_ancestors(parent)

    def _tell_ancestors(self, key: Key) -> None:
        """Each of them knows whether something below it has not ended. Where that stays as it was, none above need know."""
        while (link := self._launched_by.get(key)) is not None:
            if not self._note(*link, key, is_live=self.is_live(key)):
                return
            key = link[0]

    def _note(self, parent: Key, task: int | None, child: Key, *, is_live: bool) -> bool:
        """Whether by that the parent itself has become live, or has ceased to be."""
        was_live, groups = self.is_live(parent), self._live.setdefault(parent, {})
        if is_live:
            groups.setdefault(task, {})[child] = None
        elif task in groups:
            groups[task].pop(child, None)
            if not groups[task]:
                del groups[task]
        if not groups:
            del self._live[parent]
        return self.is_live(parent) != was_live

    # ---- what is asked ------------------------------------------------------------------------------------

    def is_live(self, key: Key) -> bool:
        """True while the job, or one that it launched, or one that those did, has not ended."""
        return key in self._unfinished or key in self._live

    def unfinished(self, key: Key) -> Key | None:
        """The job, or one that it launched, or one that those did, that has not ended; None when all are gone."""
        seen = set()
        while key not in self._unfinished:
            seen.add(key)
            below = next(self._live_children(key), None)
            if below is None or below in seen:
                return None
            key = below
        return key

    def _live_children(self, key: Key) -> Iterator[Key]:
        return (child for group in self._live.get(key, {}).values() for child in group)

    def children(self, key: Key) -> frozenset[Key]:
        """The jobs that a job has launched."""
        return frozenset(self._children.get(key, ()))

    def launching_tasks(self, key: Key) -> frozenset[int]:
        """The tasks of a job that launched others which are live."""
        return frozenset(task for task in self._live.get(key, ()) if task is not None)

    def live_of_task(self, key: Key, task: int) -> list[Key]:
        """The jobs that a task launched which are live."""
        return list(self._live.get(key, {}).get(task, ()))

    def relieved(self, key: Key) -> list[Key]:
        """The ancestors of a job that has ended which need no longer wait for it, or for what is between."""
        found: dict[Key, None] = {}
        while not self.is_live(key) and (link := self._launched_by.get(key)) is not None and link[0] not in found:
            key = link[0]
            found[key] = None
        return list(found)

    def may_launch(self, parent: Key, child: Key) -> bool:
        """False when `child` stands above `parent`, or so many do that it may launch no other."""
        key = parent
        for _ in range(MAX_DEPTH - 1):
            link = self._launched_by.get(key)
            if key == child or link is None:
                return key != child
            key = link[0]
        return False
