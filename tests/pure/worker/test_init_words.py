"""What the init of a container says is taken out of the task's own words, wherever the pieces begin and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluster_services.worker.contract.container_output import InitWords

BEGUN = b"[INFO  tini (1)] Spawned child process 'sh' with pid '7'\n"
LEFT = b"[INFO  tini (1)] Main child exited normally (with status '137')\n"
KILLED = b"[INFO  tini (1)] Main child exited with signal (with signal 'Killed')\n"


def sifted(*pieces: bytes) -> tuple[bytes, int | None]:
    words = InitWords()
    said = b"".join(words.sift(piece) for piece in pieces)
    return said + words.rest(), words.exit_code


@pytest.mark.parametrize(("last", "code"), [(LEFT, 137), (KILLED, None), (b"", None)])
def test_the_task_is_heard_and_how_it_left_is_known(last: bytes, code: int | None) -> None:
    assert sifted(b"first" + BEGUN + b"\nsecond\nno end" + last) == (b"first\nsecond\nno end", code)


def test_the_last_word_counts() -> None:
    assert sifted(LEFT + KILLED) == (b"", None)
    assert sifted(KILLED + LEFT) == (b"", 137)


PARTS = [BEGUN, LEFT, KILLED, b"[", b"[INFO ", b"\n", b"plain", b"[INFO  tini (1)] something else\n"]


@given(st.lists(st.sampled_from(PARTS), max_size=8).map(b"".join), st.data())
def test_pieces_may_begin_and_end_anywhere(text: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert sifted(*pieces) == sifted(text)


def test_what_only_looks_like_it_is_let_go_of() -> None:
    text = b"[INFO  tini (1)] " + b"x" * 5_000
    words = InitWords()
    assert words.sift(text) == text
    assert words.sift(b"[IN") == b""
    assert words.sift(b"k\n") == b"[INk\n"
    assert words.rest() == b""
