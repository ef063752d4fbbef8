"""The keys of an authority as files. One that was made once and is lost is never made anew: users that it signed for would be refused."""

from __future__ import annotations

import json
from pathlib import Path

from fluster_bus.access.address import write_private
from fluster_bus.access.keys import Key, KeyKind
from fluster_bus.core.errors import CredentialsError

OPERATOR_KEY = "operator"
_LIST_FILE = "keys.json"


class KeyFolder:
    """The seeds in a folder, and the list of those that were made there. Its owner lets one process use it at a time."""

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
