"""What the server says is understood, wherever the pieces in which it arrives begin and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_bus.core.delivery import Delivery
from fluster_bus.direct import wire
from fluster_bus.direct.wire import Info, NumberedDelivery, Parser, Ping, Pong, ProtocolError, Refusal, Said

TOKENS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
BODIES = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 1 3\r\n", b"\r\nPING\r\n", b"x" * 70_000])
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=1_000), max_size=12).map(str.strip)


def sent(message: NumberedDelivery) -> bytes:
    """As the server sends it: as a client does, but for the number of the subscription."""
    delivery = message.delivery
    line = wire.publish(delivery.subject, delivery.data, delivery.reply, delivery.headers)
    kind, _, rest = line.partition(b" ")
    _, _, sizes = rest.partition(b" ")
    return b"%b %b %d %b" % (kind.replace(b"PUB", b"MSG"), delivery.subject.encode(), message.subscription, sizes)


@st.composite
def messages(draw: st.DrawFn) -> tuple[bytes, Said]:
    headers = draw(st.none() | st.dictionaries(TOKENS.filter(lambda name: ":" not in name), VALUES, max_size=3))
    message = NumberedDelivery(
        draw(st.integers(0, 10**9)),
        Delivery(draw(SUBJECTS), draw(BODIES), draw(st.just("") | SUBJECTS), headers),
    )
    return sent(message), message


CONTROL: list[tuple[bytes, Said | None]] = [
    (b"PING\r\n", Ping()),
    (b"PONG\r\n", Pong()),
    (b"+OK\r\n", None),
    (b"-ERR 'Stale Connection'\r\n", Refusal("Stale Connection")),
    (b'INFO {"max_payload": 7}\r\n', Info({"max_payload": 7})),
    (
        b"HMSG here 3 16 16\r\nNATS/1.0 503\r\n\r\n\r\n",
        NumberedDelivery(3, Delivery("here", b"", "", {"Status": "503"})),
    ),
]


@given(st.lists(messages() | st.sampled_from(CONTROL), max_size=8), st.data())
def test_it_does_not_matter_where_the_pieces_begin(parts: list[tuple[bytes, Said | None]], data: st.DataObject) -> None:
    stream = b"".join(part for part, _said in parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10)) if stream else []
    parser, found, start = Parser(wire.message), [], 0
    for end in [*sorted(cuts), len(stream)]:
        found += parser.feed(stream[start:end])
        start = end
    assert found == [said for _part, said in parts if said is not None]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"MSG a b\r\n",
        b"MSG a b 3\r\nabc\r\n",
        b"MSG a 1 3\r\nabcdef\r\n",
        b"INFO {\r\n",
        b"x" * (2 << 20),
    ],
)
def test_what_is_not_nats_is_refused(nonsense: bytes) -> None:
    with pytest.raises(ProtocolError):
        Parser(wire.message).feed(nonsense)


def test_a_header_cannot_end_its_line() -> None:
    with pytest.raises(ValueError, match="would end its line"):
        wire.publish("here", b"", "", {"Name": "a\r\nb"})
