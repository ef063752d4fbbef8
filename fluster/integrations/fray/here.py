"""The client that this process, or this thread, works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

from fray.current_client import _current_client_var  # its public reader makes a LocalClient where there is none

if TYPE_CHECKING:
    from fluster.integrations.fray.client import FlusterClient


@overload
def client_here(*, only_if_set: Literal[True]) -> FlusterClient | None: ...
@overload
def client_here() -> FlusterClient: ...
def client_here(*, only_if_set: bool = False) -> FlusterClient | None:
    """The client that is set for fray where it is Fluster's; else one of the process's own cluster, unless it has to be
    set.
    """
    from fluster.integrations.fray.client import FlusterClient

    found = _current_client_var.get()
    if isinstance(found, FlusterClient):
        return found
    return None if only_if_set else FlusterClient()
