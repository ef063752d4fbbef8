"""The subjects on which nats-server itself answers: JetStream, accounts, and the services API, which each service answers, too."""

from __future__ import annotations

from fluster_bus.core.subjects import ANY_TAIL

# What JetStream, its buckets and object stores, and the services API go by.
ALL_BUCKETS = f"$KV.{ANY_TAIL}"
ALL_OBJECTS = f"$O.{ANY_TAIL}"
ALL_SERVICES = f"$SRV.{ANY_TAIL}"
JETSTREAM_REQUESTS = f"$JS.API.{ANY_TAIL}"
JETSTREAM_ACKS = f"$JS.ACK.{ANY_TAIL}"
JETSTREAM_FLOW = f"$JS.FC.{ANY_TAIL}"
JETSTREAM_EVENTS = f"$JS.EVENT.{ANY_TAIL}"
# Where archives are sent of which streams are made: for operators.
JETSTREAM_RESTORES = f"$JS.SNAPSHOT.RESTORE.{ANY_TAIL}"
# The same requests as JETSTREAM_REQUESTS, without overlap, by how many answers one has.
JETSTREAM_INFO = "$JS.API.INFO"
JETSTREAM_ASKS = (JETSTREAM_INFO, f"$JS.API.STREAM.{ANY_TAIL}", f"$JS.API.DIRECT.GET.*.{ANY_TAIL}")
JETSTREAM_READS = ("$JS.API.DIRECT.GET.*", f"$JS.API.CONSUMER.{ANY_TAIL}")


def direct_get(stream: str) -> str:
    """Where stored messages can be read without a consumer."""
    return f"$JS.API.DIRECT.GET.{stream}"


def stream_info(stream: str) -> str:
    return f"$JS.API.STREAM.INFO.{stream}"


STREAM_NAMES = "$JS.API.STREAM.NAMES"


def message_get(stream: str) -> str:
    """Where the server that leads a stream reads messages of it, also of one that has no direct gets."""
    return f"$JS.API.STREAM.MSG.GET.{stream}"


def stream_delete(stream: str) -> str:
    return f"$JS.API.STREAM.DELETE.{stream}"


def stream_restore(stream: str) -> str:
    """Where a stream is asked for that is made from an archive; the answer says where to send that."""
    return f"$JS.API.STREAM.RESTORE.{stream}"


def message_delete(stream: str) -> str:
    return f"$JS.API.STREAM.MSG.DELETE.{stream}"


def stream_purge(stream: str) -> str:
    return f"$JS.API.STREAM.PURGE.{stream}"


def is_ack(subject: str) -> bool:
    """True for where a stream waits for the acknowledgement of what it delivered."""
    return subject.startswith(JETSTREAM_ACKS.removesuffix(ANY_TAIL))


def is_restore(subject: str) -> bool:
    """True for where a server waits for an archive."""
    return subject.startswith(JETSTREAM_RESTORES.removesuffix(ANY_TAIL))


def is_flow(subject: str) -> bool:
    """True for where a stream waits to hear that what it delivered has been taken."""
    return subject.startswith(JETSTREAM_FLOW.removesuffix(ANY_TAIL))


# Where servers are given accounts, by users of the system account.
CLAIMS_REQUESTS = f"$SYS.REQ.CLAIMS.{ANY_TAIL}"
CLAIMS_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"


# ---- the services API of NATS (ADR-32) ------------------------------------------------------------------

SERVICE_VERBS = ("PING", "INFO", "STATS")


def service_verb(verb: str, name: str | None = None, instance: str | None = None) -> str:
    return ".".join(part for part in ("$SRV", verb, name, instance) if part is not None)  # $SRV.INFO.calculator
