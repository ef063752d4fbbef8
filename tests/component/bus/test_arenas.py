"""Memory that two processes share: who holds what, and what is freed, whichever of them dies."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fluster_bus.core.errors import PayloadLostError
from fluster_bus.payloads import arena as arena_module
from fluster_bus.payloads import arenas, payloads, pickles
from fluster_bus.payloads.arena import TABLE_BYTES, Arena, Lent, Reference
from fluster_bus.payloads.pickles import Pickled
from tests.component.arena_peer import Block, Peer, open_arenas
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as stack:

        def start(**variables: str) -> Peer:
            peer = Peer(**variables)
            stack.callback(peer.kill)
            return peer

        yield start


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """For tests that do it no harm."""
    peer = Peer()
    yield peer
    peer.kill()


@pytest.fixture
def arena() -> Iterator[Arena]:
    """One of 8 MiB, beside the one that this process has."""
    arena = Arena(8 * MIB)
    yield arena
    arena.abandon()


def lend(arena: Arena, text: str, size: int = MIB, *, until_taken: bool = False) -> Lent:
    pickled = pickles.dump(Block(text.encode() * (size // len(text))))
    assert isinstance(pickled, Pickled)
    lent = arena.lend(pickled, until_taken=until_taken)
    assert lent is not None
    return lent


def is_free(arena: Arena) -> bool:
    """Whether nothing of it is lent, after a look at what is over."""
    arena.tidy(time.monotonic())
    return not arena.lent()


# ---- held and let go ------------------------------------------------------------------------------------


def test_another_process_reads_what_is_lent_without_a_copy(arena: Arena, peer: Peer) -> None:
    lent = lend(arena, "hello")
    assert peer.hold("a", lent)
    assert peer.read("a") == "hello"
    with memoryview(arena.memory) as memory:  # it sees what changes here: it looks at the same memory
        start = lent.span.reference.start + lent.span.reference.pieces()[0][1]
        memory[start : start + 5] = b"jello"
    assert peer.look("a") == "jello"


def test_what_is_lent_is_freed_when_nobody_uses_it_any_more(arena: Arena, peer: Peer) -> None:
    lent = lend(arena, "hello")
    peer.hold("a", lent)
    assert not is_free(arena)
    del lent
    assert not is_free(arena)
    peer.read("a")
    peer.view("a")
    assert not is_free(arena)
    peer.drop("a")
    assert is_free(arena)


def test_several_receivers_hold_the_same(arena: Arena, peers: Callable[..., Peer]) -> None:
    lent = lend(arena, "hello")
    one, two = peers(), peers()
    for peer, name in ((one, "a"), (one, "b"), (two, "a")):
        peer.hold(name, lent)
    del lent
    for peer, name in ((one, "a"), (two, "a")):
        peer.drop(name)
        assert not is_free(arena)
    assert one.read("b") == "hello"
    one.drop("b")
    assert is_free(arena)


def test_who_comes_too_late_is_told(arena: Arena, peer: Peer) -> None:
    reference = bytes(lend(arena, "hello"))
    assert is_free(arena)
    again = lend(arena, "other")
    assert again.span.reference.start == Reference.decode(reference).start
    assert not peer.hold("a", reference)
    assert "its sender has released it" in peer.read("a")


def test_what_is_held_is_not_written_over(arena: Arena, peer: Peer) -> None:
    for number in range(20):
        text = f"{number:05}"
        peer.hold("new", lend(arena, text))
        peer.read("new")
        if number == 3:
            peer.hold("kept", lend(arena, "keep!"))
            peer.read("kept")
    assert peer.look("kept") == "keep!"
    assert peer.look("new") == "00019"


def test_what_this_process_lends_it_can_hold_itself() -> None:
    value = payloads.encode(Block(b"hello" * 50_000))
    assert isinstance(value, Lent)
    span = value.span
    block = payloads.decode(payloads.held(bytes(value)))
    own = value.arena
    del value
    own.tidy(time.monotonic())
    assert span in own.lent()
    assert block.data.readonly
    view = block.data[10:15]
    del block
    own.tidy(time.monotonic())
    assert bytes(view) == b"hello"
    assert span in own.lent()
    del view
    own.tidy(time.monotonic())
    assert span not in own.lent()


# ---- passed on without an answer ------------------------------------------------------------------------


def test_what_is_passed_on_stays_until_it_is_taken(arena: Arena, peer: Peer) -> None:
    reference = bytes(lend(arena, "hello", until_taken=True))
    assert not is_free(arena)
    assert arena.untaken() == 1
    peer.hold("a", reference)
    assert arena.untaken() == 0
    assert not is_free(arena)
    assert peer.read("a") == "hello"
    peer.drop("a")
    assert is_free(arena)


def test_what_nobody_takes_is_freed_after_a_while(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = bytes(lend(arena, "hello", until_taken=True))
    assert not is_free(arena)
    monkeypatch.setattr(arena_module, "UNTAKEN_S", 0.0)
    assert is_free(arena)
    with pytest.raises(PayloadLostError):
        payloads.decode(reference)


# ---- deaths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["held", "read", "viewed"])
def test_a_receiver_that_is_killed_holds_nothing(arena: Arena, peers: Callable[..., Peer], moment: str) -> None:
    peer = peers()
    lent = lend(arena, "hello")
    peer.hold("a", lent)
    if moment != "held":
        peer.read("a")
    if moment == "viewed":
        peer.view("a")
    del lent
    assert not is_free(arena)
    peer.kill()
    assert is_free(arena)


def test_a_sender_that_is_killed_takes_nothing_from_those_who_hold(peers: Callable[..., Peer], peer: Peer) -> None:
    sender, receiver = peers(), peers()
    held, also, late = sender.lend("a", "hello"), sender.pass_on("b", "other"), sender.lend("c", "later")
    assert receiver.hold("a", held)
    assert receiver.hold("b", also)
    sender.kill()
    assert receiver.read("a") == "hello"
    assert receiver.read("b") == "other"
    assert not peer.hold("c", late)
    assert "No such file" in peer.read("c")


def test_a_mapping_is_closed_when_it_was_not_used_for_a_while(peer: Peer) -> None:
    arenas.here().mappings.tidy(time.monotonic() + 1_000)
    before = open_arenas()
    payload = payloads.held(peer.lend("a", "hello"))
    assert open_arenas() > before
    assert arenas.here().mappings.tidy(time.monotonic() + 1_000), "it is held"
    del payload
    assert arenas.here().mappings.tidy(time.monotonic()), "it may be used again soon"
    assert not arenas.here().mappings.tidy(time.monotonic() + 1_000)
    assert open_arenas() == before


def test_a_forked_child_keeps_no_memory_of_its_parents() -> None:
    script = textwrap.dedent("""
        import os, sys
        from fluster_bus.payloads import arenas, payloads
        lent = payloads.encode(b"hello" * 50_000)
        held = payloads.held(bytes(lent))
        from tests.component.arena_peer import open_arenas
        assert open_arenas(), "of the parent"
        child = os.fork()
        if child == 0:
            own = open_arenas()
            again = payloads.encode(b"other" * 50_000)
            assert payloads.decode(again) == b"other" * 50_000
            assert payloads.decode(bytes(lent)) == b"hello" * 50_000, "as any other process"
            os._exit(10 + own)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
        assert payloads.decode(held) == b"hello" * 50_000
    """)
    path = ":".join(each for each in sys.path if each)
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True)


# ---- room -----------------------------------------------------------------------------------------------


def test_a_full_arena_lends_nothing_and_the_payload_travels_itself(arena: Arena, peer: Peer) -> None:
    lent = [lend(arena, "hello") for _ in range(7)]
    pickled = pickles.dump(Block(bytes(2 * MIB)))
    assert isinstance(pickled, Pickled)
    assert arena.lend(pickled) is None
    peer.hold("a", lent[3])
    lent.clear()
    peer.drop("a")
    assert arena.lend(pickled) is not None, "it looks through all that is over before it gives up"


def test_without_room_the_payload_travels_in_the_message(peers: Callable[..., Peer]) -> None:
    small = peers(FLUSTER_ARENA_BYTES="100k")
    payload = small.lend("a", "hello")
    assert payload[0] == 0x02
    assert small.place() == arenas.place()
    none = peers(FLUSTER_ARENA_BYTES="0")
    assert none.lend("a", "hello") == payload
    assert none.place() is None
    none.hold("b", payloads.encode(Block(bytes(100_000))))
    assert "takes no shared memory" in none.read("b")


def test_a_limit_of_the_process_bounds_what_it_lends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_CGROUPS", tmp_path)
    whole = arenas.lendable_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert arenas.lendable_bytes() == whole
    (tmp_path / "memory.max").write_text(f"{256 * MIB}\n")  # of a group that this process is in, or one above
    assert arenas.lendable_bytes() == 64 * MIB
    monkeypatch.setenv(arenas.SIZE_VARIABLE, "5MiB")
    assert arenas.lendable_bytes() == 5 * MIB


def test_pages_go_back_to_the_system_when_nobody_used_them_for_a_while(arena: Arena, peer: Peer) -> None:
    kept, *more = [lend(arena, "hello") for _ in range(6)]
    peer.hold("a", kept)
    del kept
    more.clear()
    now = time.monotonic()
    assert arena.tidy(now)
    assert _pages_kib(arena) > 5 * 1024, "they are used again at once"
    assert arena.tidy(now + 20)
    assert MIB // 1024 <= _pages_kib(arena) < 2 * 1024
    assert peer.read("a") == "hello"
    peer.drop("a")
    assert not arena.tidy(now + 40)
    assert _pages_kib(arena) < 100


def _pages_kib(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks // 2


def test_the_housekeeper_goes_when_there_is_nothing_left_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_TICK_S", 0.001)
    monkeypatch.setattr(arena_module, "_COOL_S", 0.0)
    here = arenas.ProcessMemory()
    for _ in range(3):
        lent = here.lend(Pickled([b"x" * 100_000], []), until_taken=False)
        assert here.is_tidying
        del lent
        wait_until(lambda: not here.is_tidying)
    here.abandon()


# ---- of one user only --------------------------------------------------------------------------------------


def test_an_arena_is_private_and_keeps_its_size(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 0)


def test_another_user_is_elsewhere(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer.place() == arenas.place()
    monkeypatch.setattr("os.geteuid", lambda: 12_345)
    assert arenas.measured_place() != arenas.place()


def test_references_that_point_elsewhere_are_refused(arena: Arena, peer: Peer, peers: Callable[..., Peer]) -> None:
    stranger = peers()  # has not opened the arena
    good = lend(arena, "hello")
    reference = good.span.reference
    last = TABLE_BYTES + arena._spans.size  # noqa: SLF001 - where the arena ends, to point behind it
    for wrong, reason in (
        (reference._replace(start=0), "outside of the arena"),
        (reference._replace(start=last), "outside of the arena"),
        (reference._replace(sizes=(*reference.sizes, last)), "outside of the arena"),
        (reference._replace(slot=1 << 20), "outside of the arena"),
        (reference._replace(generation=77), "has released it"),
        (reference._replace(slot=9), "has released it"),
    ):
        assert not peer.hold("a", wrong.encode())
        assert reason in peer.read("a")
    for wrong in (reference._replace(pid=1), reference._replace(fd=0), reference._replace(arena=bytes(16))):
        assert not stranger.hold("a", wrong.encode())
        assert "cannot be read" in stranger.read("a")
    assert stranger.hold("a", good)
    assert stranger.read("a") == "hello"


def test_a_reference_from_before_holds_nothing_of_what_lies_in_its_slot_now(arena: Arena) -> None:
    first = lend(arena, "first")
    reference = Reference.decode(bytes(first))
    span = arena.hold(reference)
    assert span is not None
    arena.let_go(span)
    del first
    second = lend(arena, "second")
    assert (second.span.reference.slot, second.span.reference.generation) == (reference.slot, reference.generation + 1)
    assert arena.hold(reference) is None
    del second
    for _ in range(2):
        arena.tidy(time.monotonic())
    assert arena.untaken() == 0
    third = lend(arena, "third")
    assert third.span.holds == 0, "nobody holds what the old reference did not name"
