"""How far the producer of a stream may be ahead of its reader: counted at both ends, without any I/O.

Both ends count items and bytes from the stream's beginning. The reader tells what it has read whenever that is half
a window more than it told before; so a credit that is lost or doubled does no harm once the next one comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Window(NamedTuple):
    """The most that may be on its way: so many items, and so many bytes plus those of one item."""

    items: int
    size: int


@dataclass(slots=True)
class Produced:
    """What a producer has sent, and what it knows to be read."""

    window: Window
    items: int = 0
    size: int = 0
    read_items: int = 0
    read_size: int = 0

    def send(self, size: int) -> bool:
        """One more item was sent; False when there is no room for the next."""
        self.items += 1
        self.size += size
        return self.has_room

    @property
    def has_room(self) -> bool:
        # Bytes may be overdrawn by one item: else one that is larger than the window's rest would wait for a reader who
        # has read everything, and has nothing to tell.
        return self.items - self.read_items < self.window.items and self.size - self.read_size < self.window.size

    def on_read(self, items: int, size: int) -> None:
        """The reader tells that it has read so much since the beginning."""
        self.read_items = max(self.read_items, min(items, self.items))
        self.read_size = max(self.read_size, min(size, self.size))


@dataclass(slots=True)
class Read:
    """What a reader has read, and how much of that it has reported."""

    window: Window
    items: int = 0
    size: int = 0
    told_items: int = 0
    told_size: int = 0

    def read(self, size: int) -> bool:
        """One more item was read; True when it is time to tell the producer, which this takes for done."""
        self.items += 1
        self.size += size
        if (
            2 * (self.items - self.told_items) < self.window.items
            and 2 * (self.size - self.told_size) < self.window.size
        ):
            return False
        self.told_items, self.told_size = self.items, self.size
        return True
