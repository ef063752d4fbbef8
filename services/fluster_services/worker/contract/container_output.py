"""Reads a container's output: takes out what its init says, and misses and repeats nothing when the engine was away.

And waits until its init can be sent signals.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

INIT_VARIABLES = {"TINI_VERBOSITY": "2"}
_INIT_MARK = b"[INFO  tini (1)] "
_INIT_LINE = re.compile(
    re.escape(_INIT_MARK) + rb"(?:Spawned child process '.*' with pid '\d+'|Main child exited "
    rb"(?:normally \(with status '(\d{1,3})'\)|with signal \(with signal '.*'\)))\n"
)
_INIT_LONGEST = 1_000  # a line that does not end by then is none of its
_INIT_S, _INIT_LOOK_S = 0.3, 0.002  # for process 1 of a container to listen to signals
_TAIL_BYTES = 64 << 10  # by which the two are compared


class InitWords:
    """What the init that Docker brings (tini) says about a task, taken out of the task's stdout.

    Its exit code alone does not tell 128 + n from signal n. Asked for it by INIT_VARIABLES, it ends with lines that do:

        [INFO  tini (1)] Spawned child process 'sh' with pid '7'
        [INFO  tini (1)] Main child exited normally (with status '137')
        [INFO  tini (1)] Main child exited with signal (with signal 'Killed')

    Hand all of a stream to `sift` and then call `rest`: what they return is without those lines.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None  # with which the task left by itself, as far as is known
        self._held = b""  # may be the beginning of such a line

    def sift(self, data: bytes) -> bytes:
        data = _INIT_LINE.sub(self._note, self._held + data)
        start = _begun(data)
        self._held = data[start:]
        return data[:start]

    def rest(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _note(self, line: re.Match[bytes]) -> bytes:
        self.exit_code = int(line[1]) if line[1] is not None else None
        return b""


def _begun(data: bytes) -> int:
    """Where a line begins that is not complete; the length of `data` if none does."""
    start = data.rfind(_INIT_MARK)
    if start >= 0 and b"\n" not in data[start:] and len(data) - start < _INIT_LONGEST:
        return start
    for size in range(min(len(_INIT_MARK) - 1, len(data)), 0, -1):
        if data.endswith(_INIT_MARK[:size]):
            return len(data) - size
    return len(data)


class LogPosition:
    """Where a reader is in a stream of a container's output. Give `new` all that is read, and call `again` whenever that
    begins anew.

    What comes live is also in the engine's log, which can be read again from its beginning. But an engine that ends may have told
    lines that it had not logged yet: so the log goes on after what both have, which is not always what was read.
    """

    def __init__(self) -> None:
        self._end = 0  # in the engine's log, as far as is known
        self._tail = bytearray()  # what lies before it, that much of it at least
        self._skip = 0  # bytes, read again, that lie before the tail
        self._expected = b""  # of the tail, what is still to be read again

    def again(self) -> None:
        self._skip = self._end - len(self._tail)
        self._expected = bytes(self._tail)

    def new(self, data: bytes) -> bytes:
        """What of `data` was not told before."""
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._compared(data[skipped:]) if self._expected else data[skipped:]
        self._end += len(data)
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:  # not each time: most pieces are small
            del self._tail[:-_TAIL_BYTES]
        return data

    def _compared(self, data: bytes) -> bytes:
        both = min(len(self._expected), len(data))
        if self._expected[:both] == data[:both]:
            self._expected = self._expected[both:]
            return data[both:]
        same = next(index for index in range(both) if self._expected[index] != data[index])
        # The rest of the tail was read and never logged. The log has whole lines, so what follows begins with one.
        matched = bytes(self._tail[: len(self._tail) - len(self._expected) + same])
        line = matched.rfind(b"\n") + 1
        if line == 0 and self._end > len(self._tail):  # it began before the tail
            line = len(matched)
        self._end -= len(self._tail) - line
        del self._tail[line:]
        self._expected = b""
        return matched[line:] + data[same:]


def exactly(read: Callable[[int], bytes | None], size: int) -> bytes:
    """So many bytes of what `read` gives piece by piece; fewer at its end."""
    found = b""
    while len(found) < size and (data := read(size - len(found))):
        found += data
    return found


def wait_init(pid: int) -> None:
    """Return when process 1 of a container listens to signals: the kernel drops those that come earlier."""
    deadline = time.monotonic() + _INIT_S
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # over, or not to be seen from here
            return
        # Docker's own first blocks what it waits for, which does not show while it waits, and then ignores SIGTTOU.
        if _has(status, "SigIgn", signal.SIGTTOU) or _has(status, "SigCgt", signal.SIGTERM):
            return
        time.sleep(_INIT_LOOK_S)


def _has(status: str, name: str, number: int) -> bool:
    return bool(int(status.partition(f"\n{name}:\t")[2][:16], 16) >> (number - 1) & 1)
