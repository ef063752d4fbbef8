"""Whether a namespace whose streams are missing was dropped, or never there: then nothing of it is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, ServiceError
from fluster_bus.messages import NamespaceReply, NamespaceRequest
from fluster_bus.messages.namespaces import NAMESPACE_UNKNOWN
from fluster_bus.messages.parts.wire_range import SPOKEN

if TYPE_CHECKING:
    from fluster_bus.connection.bus import Bus

_ASKED_S = 2.0


async def is_gone(bus: Bus, namespace: str) -> bool:
    """True when the controller says that the cluster has no such namespace; False when it has, or nobody says."""
    try:
        await bus.ask(
            subjects.ensure_namespace(namespace), NamespaceRequest(wire=SPOKEN), NamespaceReply, timeout_s=_ASKED_S
        )
    except ServiceError as error:
        return error.code == NAMESPACE_UNKNOWN
    except BusError:
        return False
    return False
