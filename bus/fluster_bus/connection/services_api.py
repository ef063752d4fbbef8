"""Answers to `nats micro ls / info / stats`, so that plain tools see who serves what.

nats-py's own `nats.micro` runs the handlers as well, one after the other for each endpoint; here they run on the
subscriptions that serve anyhow, and only its messages are used, imported on the first question. Source of the protocol: NATS ADR-32.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fluster_bus.core import server_subjects, subjects
from fluster_bus.core.errors import InvalidMessageError, one_bounded_line
from fluster_bus.core.json_types import JsonObject
from fluster_bus.messages.parts.wire_range import SPOKEN

if TYPE_CHECKING:
    from nats.micro.service import EndpointStats

    from fluster_bus.connection.carrier import Carrier, Interest
    from fluster_bus.core.delivery import Delivery


@dataclass(frozen=True)
class ServedEndpoint:
    """One thing that a service answers."""

    name: str
    subject: str
    queue: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    describe: Callable[[], Mapping[str, str]] = dict  # more metadata, which takes its time: made when it is asked for


@dataclass
class EndpointCounts:
    """What an endpoint has done so far."""

    requests: int = 0
    errors: int = 0
    last_error: str = ""
    processing_ns: int = 0
    data: dict[str, int] = field(default_factory=dict)  # whatever else is counted


class Announcement:
    """A service that plain NATS tools can list; `counts` maps an endpoint's name to what it did."""

    def __init__(
        self,
        name: str,
        instance: str,
        version: str,
        *,
        description: str,
        endpoints: Sequence[ServedEndpoint],
        counts: Callable[[], Mapping[str, EndpointCounts]] = dict,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._instance = instance
        self._version = version
        self._description = description
        self._endpoints = endpoints
        self._counts = counts
        # Also what it speaks, so that plain tools list who is older than the rest.
        self._metadata = {"wire": str(SPOKEN.newest), "wire_oldest": str(SPOKEN.oldest), **(metadata or {})}
        self._started = datetime.now(UTC)

    async def serve(self, bus: Carrier) -> list[Interest]:
        """Begin to answer; drain what is returned to end it."""
        answers: dict[str, Callable[[], JsonObject]] = {
            "PING": self._ping,
            "INFO": self._info,
            "STATS": self._stats,
        }
        return [
            await bus.subscribe(subject, _answering(bus, answers[verb]))
            for verb in server_subjects.SERVICE_VERBS
            for subject in (
                server_subjects.service_verb(verb),
                server_subjects.service_verb(verb, self._name),
                server_subjects.service_verb(verb, self._name, self._instance),
            )
        ]

    def _ping(self) -> dict[str, object]:
        from nats.micro.service import ServicePing

        ping = ServicePing(id=self._instance, name=self._name, version=self._version, metadata=self._metadata)
        return ping.to_dict()

    def _info(self) -> dict[str, object]:
        from nats.micro.service import EndpointInfo, ServiceInfo

        endpoints = [
            EndpointInfo(each.name, each.subject, each.queue, {**each.metadata, **each.describe()})
            for each in self._endpoints
        ]
        info = ServiceInfo(
            name=self._name,
            id=self._instance,
            version=self._version,
            description=self._description,
            metadata=self._metadata,
            endpoints=endpoints,
        )
        return info.to_dict()

    def _stats(self) -> dict[str, object]:
        from nats.micro.service import ServiceStats

        counts = self._counts()
        stats = [_endpoint_stats(endpoint, counts.get(endpoint.name, EndpointCounts())) for endpoint in self._endpoints]
        return ServiceStats(
            id=self._instance,
            name=self._name,
            version=self._version,
            started=self._started,
            metadata=self._metadata,
            endpoints=stats,
        ).to_dict()


def read_info(
    data: bytes, *, name: str, instance: str, is_served: Callable[[str], bool]
) -> list[tuple[str, Mapping[str, str]]]:
    """Name and metadata of each endpoint in an answer to `$SRV.INFO.<name>.<instance>`; those without a subject are left out.

    Any program that hears the question may answer. Raises InvalidMessageError for an answer of another instance, or one that names a
    subject that `is_served` says is not the instance's.
    """
    try:
        told = json.loads(data)
        if (told["name"], told["id"]) != (name, instance):
            raise ValueError(f"it is that of {told['name']}.{told['id']}")
        found = []
        for each in told["endpoints"]:
            subject, metadata = each["subject"], each.get("metadata") or {}
            texts = [each["name"], subject, *metadata.keys(), *metadata.values()]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("what it says of an endpoint is not text")
            if subject and not is_served(subject):
                raise ValueError(f"it names the subject {subject}, which is another's")
            if subject:
                found.append((each["name"], metadata))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidMessageError(f"an answer for {name}.{instance} is not used: {one_bounded_line(error)}") from error
    return found


def _endpoint_stats(endpoint: ServedEndpoint, counts: EndpointCounts) -> EndpointStats:
    from nats.micro.service import EndpointStats

    return EndpointStats(
        name=endpoint.name,
        subject=endpoint.subject,
        queue_group=endpoint.queue,
        num_requests=counts.requests,
        num_errors=counts.errors,
        last_error=counts.last_error,
        processing_time=counts.processing_ns,
        average_processing_time=counts.processing_ns // max(counts.requests, 1),
        data=counts.data or None,
    )


def _answering(bus: Carrier, answer: Callable[[], JsonObject]) -> Callable[[Delivery], Any]:
    async def on_delivery(delivery: Delivery) -> None:
        if subjects.is_inbox(delivery.reply):
            told = await asyncio.to_thread(answer)
            await bus.publish(delivery.reply, json.dumps(told).encode())

    return on_delivery
