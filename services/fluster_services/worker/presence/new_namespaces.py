"""Has a worker that runs serve further namespaces: those whose jobs' credentials come into its folder.

A namespace is served once the server lets this worker use its subjects, which the answer to a question on one of them proves.
A worker with signed credentials can serve those that stand in these, and no others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from fluster_bus.access.address import BusAddress
from fluster_bus.connection.bus import Bus
from fluster_bus.core import subjects
from fluster_bus.core.errors import BusError, CredentialsError, ServiceError
from fluster_bus.messages import Namespace, NamespaceReply, NamespaceRequest, WorkerId
from fluster_bus.messages.parts.wire_range import SPOKEN
from fluster_services.worker.presence.identity import JobFiles

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASKED_S = 2.0
_ASK_AGAIN_S = 2.0


def why_not_signed_for(worker_id: str, namespace: str, signed: Collection[str]) -> str:
    """Why a worker whose credentials name the namespaces `signed` cannot serve another, and what to do."""
    served = ", ".join(sorted(signed)) or "none"
    return (
        f"worker {worker_id} cannot serve namespace {namespace!r}: its own credentials are signed for {served}; start one beside it "
        f"with credentials for all (`fluster credentials add worker NAME --namespace {namespace}`), and drain this one"
    )


def why_not_let(worker_id: str, namespace: str) -> str:
    """Why a worker of a server with passwords cannot serve a namespace yet, and what to do."""
    return (
        f"worker {worker_id} cannot serve namespace {namespace!r} yet: the server does not let it; make the server's configuration "
        "anew with that namespace, and reload the server (`nats-server --signal reload`)"
    )


class NewNamespaces:
    """Looks into the folder until cancelled. `serve` is awaited for each namespace that can be served from now on.

    It raises OSError or BusError where that has failed: then it is tried again.
    """

    def __init__(
        self,
        bus: Bus,
        worker_id: WorkerId,
        files: JobFiles,
        *,
        signed: Collection[str] | None,
        served: Callable[[], Collection[Namespace]],
        serve: Callable[[Namespace, BusAddress], Awaitable[None]],
    ) -> None:
        """`signed` are the namespaces in the worker's signed credentials; None where it has a password. `served` tells those served by now."""
        self._bus = bus
        self._worker_id = worker_id
        self._files = files
        self._signed = signed
        self._served = served
        self._serve = serve
        self._troubles: dict[Namespace, str] = {}
        self._ask_at: dict[Namespace, float] = {}

    def problems(self) -> list[str]:
        """Why namespaces are not served whose jobs' credentials are there."""
        served = self._served()  # others may see that one is served before this has noted it
        return [self._troubles[each] for each in sorted(self._troubles) if each not in served]

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        try:
            found = await asyncio.to_thread(self._files.read)
        except OSError as error:
            self._note_folder(error)
            return
        waiting = {each: address for each, address in found.items() if each not in self._served()}
        for namespace in [each for each in self._troubles if each not in waiting]:
            del self._troubles[namespace]
        for namespace, address in waiting.items():
            await self._try(namespace, address)

    def _note_folder(self, error: OSError) -> None:
        key = Namespace("")  # of no namespace
        self._note(key, f"the folder of jobs' credentials {self._files.folder} cannot be read: {error.strerror}")

    async def _try(self, namespace: Namespace, address: BusAddress) -> None:
        if self._signed is not None and namespace not in self._signed:
            self._note(namespace, why_not_signed_for(self._worker_id, namespace, self._signed))
            return
        if time.monotonic() < self._ask_at.get(namespace, 0.0):
            return
        try:
            if not await self._is_let(namespace):
                self._note(namespace, why_not_let(self._worker_id, namespace))
                self._ask_at[namespace] = time.monotonic() + _ASK_AGAIN_S
                return
            await self._serve(namespace, address)
        except (OSError, BusError) as error:
            log.info("namespace %s is served by %s later: %s", namespace, self._worker_id, error)
            self._ask_at[namespace] = time.monotonic() + _ASK_AGAIN_S
            return
        self._troubles.pop(namespace, None)
        log.info("%s serves namespace %s from now on", self._worker_id, namespace)

    async def _is_let(self, namespace: Namespace) -> bool:
        """Whether the server lets this worker use the namespace's subjects. Raises BusError when nothing answers there."""
        request = NamespaceRequest(wire=SPOKEN)
        try:
            with suppress(ServiceError):  # it was heard: a namespace that does not exist yet is served when it does
                await self._bus.ask(subjects.ensure_namespace(namespace), request, NamespaceReply, timeout_s=_ASKED_S)
        except CredentialsError:
            return False
        return True

    def _note(self, namespace: Namespace, trouble: str) -> None:
        if self._troubles.get(namespace) != trouble:
            self._troubles[namespace] = trouble
            log.warning("%s", trouble)
