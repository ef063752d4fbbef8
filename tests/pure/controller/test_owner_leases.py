"""Which programs that own jobs have ended, by what is heard of them."""

import random

from fluster_bus.messages import Namespace
from fluster_services.controller.sweeps.owners import Owner, OwnerLeases

LEASE_S = 10.0
A, B = (Owner(Namespace("default"), name) for name in "ab")


def test_silence_ends_it_and_a_word_keeps_it() -> None:
    leases = OwnerLeases(LEASE_S)
    leases.expect(A, now=0)
    leases.expect(B, now=0)
    leases.on_heard(B, now=6)
    assert leases.over(now=9.9) == {}
    assert leases.over(now=10) == {A: "the program that owns it, a, was not heard for 10 s"}
    leases.expect(A, now=10)  # another record of it is not a sign of life
    assert set(leases.over(now=15.9)) == {A}
    leases.forget(A)
    assert set(leases.over(now=16)) == {B}


def test_its_end_counts_at_once_and_for_what_comes_after_it() -> None:
    leases = OwnerLeases(LEASE_S)
    leases.expect(A, now=0)
    leases.on_end(A)
    assert leases.over(now=0) == {A: "the program that owns it, a, has ended"}
    leases.on_heard(A, now=1)
    leases.on_interruption(now=2)
    assert set(leases.over(now=2)) == {A}
    leases.forget(A)
    assert leases.over(now=3) == {}
    leases.expect(A, now=4)  # it was submitted before the end, and recorded after it
    assert set(leases.over(now=4)) == {A}
    assert leases.has_ended(A)
    assert not leases.has_ended(B)


def test_what_was_submitted_before_its_end_was_told_may_still_come() -> None:
    leases = OwnerLeases(LEASE_S)
    leases.on_order(A, 3)
    assert not leases.may_come(A, settled=3), "it lives"
    leases.on_end(A)
    leases.on_order(A, 7)
    leases.on_end(A)
    leases.on_order(A, 9)  # what came since is not its own
    assert [leases.may_come(A, settled=settled) for settled in (3, 7, 8, 10)] == [True, True, False, False]


def test_no_one_is_noted_whom_no_record_names() -> None:
    leases = OwnerLeases(LEASE_S)
    leases.on_heard(A, now=0)
    assert leases.over(now=1_000) == {}


def test_there_are_so_many_of_a_namespace_and_no_more() -> None:
    leases = OwnerLeases(LEASE_S, most=2)
    other = Owner(Namespace("other"), "a")
    c = Owner(Namespace("default"), "c")
    for owner in (A, B, A):
        assert leases.why_refused(owner) is None
        leases.expect(owner, now=0)
    assert [leases.why_refused(each) is None for each in (A, B, c, other)] == [True, True, False, True]
    assert str(leases.why_refused(c)).startswith(
        "2 programs own jobs in namespace 'default', and 'c' would be one more"
    )
    leases.forget(A)
    leases.forget(A)
    assert leases.why_refused(c) is None
    leases.expect(c, now=0)
    assert leases.why_refused(A) is not None


def test_ends_told_in_one_namespace_are_not_forgotten_for_those_of_another() -> None:
    leases = OwnerLeases(LEASE_S)
    leases.on_end(A)
    for number in range(20_000):
        leases.on_end(Owner(Namespace("other"), str(number)))
    assert leases.has_ended(A)
    assert not leases.has_ended(Owner(Namespace("other"), "0")), "they are bounded"


def test_only_time_in_which_it_could_be_heard_is_counted() -> None:
    """Whatever happened, an owner ends by silence only after a whole lease without word and without interruption."""
    for seed in range(300):
        dice = random.Random(seed)
        leases, now, since = OwnerLeases(LEASE_S), 0.0, 0.0
        leases.expect(A, now=now)
        for _ in range(50):
            now += dice.random() * 4
            match dice.randrange(4):
                case 0:
                    leases.on_heard(A, now=now)
                    since = now
                case 1:
                    leases.on_interruption(now=now)
                    since = now
                case _:
                    assert (A in leases.over(now=now)) == (now - since >= LEASE_S), seed
