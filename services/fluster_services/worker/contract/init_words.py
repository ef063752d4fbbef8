"""What the init that Docker brings (tini) says about a task, taken out of the task's stdout.

Its exit code alone does not tell 128 + n from signal n. Asked for it by VARIABLE, it ends with lines that do:

    [INFO  tini (1)] Spawned child process 'sh' with pid '7'
    [INFO  tini (1)] Main child exited normally (with status '137')
    [INFO  tini (1)] Main child exited with signal (with signal 'Killed')
"""

from __future__ import annotations

import re

VARIABLE = {"TINI_VERBOSITY": "2"}
_MARK = b"[INFO  tini (1)] "
_LINE = re.compile(
    re.escape(_MARK) + rb"(?:Spawned child process '.*' with pid '\d+'|Main child exited "
    rb"(?:normally \(with status '(\d{1,3})'\)|with signal \(with signal '.*'\)))\n"
)
_LONGEST = 1_000  # a line that does not end by then is none of its


class InitWords:
    """Hand all of a stream to `sift` and then call `rest`: what they return is without those lines."""

    def __init__(self) -> None:
        self.exit_code: int | None = None  # with which the task left by itself, as far as is known
        self._held = b""  # may be the beginning of such a line

    def sift(self, data: bytes) -> bytes:
        data = _LINE.sub(self._note, self._held + data)
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
    start = data.rfind(_MARK)
    if start >= 0 and b"\n" not in data[start:] and len(data) - start < _LONGEST:
        return start
    for size in range(min(len(_MARK) - 1, len(data)), 0, -1):
        if data.endswith(_MARK[:size]):
            return len(data) - size
    return len(data)
