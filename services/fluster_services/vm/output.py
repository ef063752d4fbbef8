"""What a VM writes: kept in a file where one is wanted, and its end in memory."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

from fluster_services.private_files import open_private

_TAIL_BYTES = 4_000
_WORDS_LINES, _WORDS_CHARS = 3, 600
_FILE_BYTES = 10 << 20  # then it is set aside, and the one before it dropped


class Output:
    """Written by one thread, read by others."""

    def __init__(self, file: Path | None) -> None:
        self._path = file
        self._file: BinaryIO | None = None
        self._tail = b""
        self._is_closed = False
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Take in what the VM wrote."""
        with self._lock:
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            if self._path is None or self._is_closed:
                return
            if self._file is None:
                self._file = open(self._path, "ab", opener=open_private)  # noqa: SIM115 - Path.open takes no opener; closed by `close`
            self._file.write(data)
            self._file.flush()
            if self._file.tell() >= _FILE_BYTES:
                self._file.close()
                self._file = None
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def last_words(self) -> str:
        """The last lines, as one line."""
        lines = [line.strip() for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_WORDS_LINES:])[-_WORDS_CHARS:]

    def close(self) -> None:
        """Keep no file open; what comes yet is not written there."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None
