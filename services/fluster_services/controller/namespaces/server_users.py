"""What a controller has done with the users of a server that the cluster's supervisor keeps."""

from __future__ import annotations

from typing import Protocol


class ServerUsers(Protocol):
    """The users of a server with passwords that the cluster's own supervisor keeps."""

    async def let_in(self, namespace: str, /) -> bool:
        """Have the users of a namespace let in; False when that takes longer, and is to be asked again."""

    def forget(self, namespace: str, /) -> None:
        """The namespace is gone: have its users let in no more from the cluster's next start on."""
