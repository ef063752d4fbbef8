"""The router: where calls go, and that each ends once, whatever happens to members, messages and the connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fluster.actors.protocol.calls import Broadcast, Call, Done, Part, Send
from fluster.actors.protocol.failures import FULL, encode_failure
from fluster.actors.protocol.frames import ITEMS, MAX_BYTES, MAX_CALLS, MAX_CANCELS, Moment, WireReply
from fluster.actors.protocol.members import Member
from fluster.actors.protocol.policies import LeastOutstanding, Policy, Random, RoundRobin
from fluster.actors.results.futures import ActorFuture
from fluster.actors.routing.messages_out import MessageOut
from fluster.actors.routing.router import RECONNECT_GRACE_S, Router
from fluster.actors.routing.routing_pass import NobodyServesError
from fluster.errors import (
    ActorDiedError,
    ActorError,
    ActorNotFoundError,
    ConnectionLostError,
    MailboxFullError,
    NotRunError,
)
from fluster_bus.core import codec
from fluster_bus.messages import EndpointId

START = Moment("boot", 1_000.0, 1_700_000_000.0)
FULL_REPLY = encode_failure(MailboxFullError("full"), advice=FULL)


def member(endpoint_id: str, *, leaving: bool = False, disconnected_at: Moment | None = None) -> Member:
    address = f"to.{endpoint_id}"
    return Member(EndpointId(endpoint_id), "pool", address, leaving=leaving, disconnected_at=disconnected_at)


def future_of(call: Call) -> ActorFuture[Any]:
    assert isinstance(call.ticket, ActorFuture)
    return call.ticket


def call(method: str = "m", *, size: int = 1, pinned: str | None = None, waits: bool = False) -> Call:
    return Call("pool", method, b"x" * size, future(f"pool.{method}"), pinned=pinned, waits=waits)


def future(name: str) -> ActorFuture[Any]:
    return ActorFuture(name, withdraw=lambda _call: None)


def broadcast(opened: list[ActorFuture[Any]]) -> Broadcast:
    def make(members: Sequence[Member], call_for: Callable[[ActorFuture[Any]], Call]) -> dict[str, Call]:
        opened.extend(future(f"pool.all at {each.endpoint_id}") for each in members)
        calls: dict[str, Call] = {each.endpoint_id: call_for(it) for each, it in zip(members, opened, strict=True)}
        for item in calls.values():
            future_of(item).begin_unseen(item)
        return calls

    return Broadcast("pool", "all", b"x", make, lambda _error: None, carry=lambda _members, _carried: None)


def router_with(*endpoint_ids: str) -> Router:
    router = Router()
    router.open_pool("pool", RoundRobin())
    for endpoint_id in endpoint_ids:
        router.on_member("pool", member(endpoint_id))
    router.on_known("pool")
    return router


def targets(sends: list[Send]) -> list[tuple[str, list[str]]]:
    return [(send.member.endpoint_id if send.member else "all", [each.method for each in send.calls]) for send in sends]


def to(message: MessageOut | None) -> str | None:
    if message is None:
        return None
    return message.member.endpoint_id if message.member is not None else "all"


def errors(done: Sequence[Done | Part]) -> list[type[Exception] | None]:
    return [type(each.error) if isinstance(each, Done) and each.error else None for each in done]


def test_calls_go_round_and_those_of_one_tick_travel_together() -> None:
    router = router_with("a", "b")
    sends, done = router.route([call("1"), call("2"), call("3"), call("4")], START)
    assert targets(sends) == [("a", ["1", "3"]), ("b", ["2", "4"])]
    assert done == []
    assert targets(router.route([call("5")], START)[0]) == [("a", ["5"])]


def test_a_fault_ends_its_own_call_wherever_it_waits() -> None:
    class FaultyTicket(ActorFuture[Any]):
        def begin(self, call: object) -> bool:
            raise KeyError(str(call))

    def some_calls() -> list[Call | Broadcast]:
        return [call("1"), Call("pool", "bad", b"", FaultyTicket("pool.bad")), call("2"), broadcast([])]

    router = router_with("a")
    sends, done = router.route(some_calls(), START)
    assert targets(sends) == [("a", ["1", "2"]), ("all", ["all"])]
    assert errors(done) == [ActorError]
    router.open_pool("pool", RoundRobin())
    assert router.route(some_calls(), START) == ([], [])
    router.on_member("pool", member("a"))
    router.on_known("pool")
    sends, done = router.route_waiting("pool", START)
    assert targets(sends) == [("a", ["1", "2"]), ("all", ["all"])]
    assert errors(done) == [ActorError]
    assert isinstance(done[0].error and done[0].error.__cause__, KeyError)


def test_a_message_carries_no_more_than_it_may() -> None:
    router = router_with("a")
    many, _ = router.route([call(size=1) for _ in range(2 * MAX_CALLS + 1)], START)
    assert [len(send.calls) for send in many] == [MAX_CALLS, MAX_CALLS, 1]
    half = MAX_BYTES // 2
    large, _ = router.route([call(size=half), call(size=half), call(size=1), call(size=MAX_BYTES * 3), call()], START)
    assert [[len(each.payload) for each in send.calls] for send in large] == [[half, half], [1], [MAX_BYTES * 3], [1]]


def test_nothing_overtakes_a_broadcast() -> None:
    router = router_with("a")
    opened: list[ActorFuture[Any]] = []
    sends, _ = router.route([call("1"), call("2"), broadcast(opened), call("3")], START)
    assert targets(sends) == [("a", ["1", "2"]), ("all", ["all"]), ("a", ["3"])]


def test_calls_wait_in_order_until_the_members_are_known() -> None:
    router = Router()
    router.open_pool("pool", RoundRobin())
    assert router.route([call("1"), call("2")], START) == ([], [])
    router.on_member("pool", member("a"))
    assert router.route_waiting("pool", START) == ([], [])
    router.on_known("pool")
    assert targets(router.route_waiting("pool", START)[0]) == [("a", ["1", "2"])]


def test_a_call_to_an_empty_pool_is_over_at_once() -> None:
    router = router_with()
    sends, done = router.route([call()], START)
    assert sends == []
    assert errors(done) == [NobodyServesError]


def test_a_member_that_leaves_gets_no_more_but_still_answers() -> None:
    router = router_with("a", "b")
    (to_a, _to_b), _ = router.route([call("1"), call("2")], START)
    assert router.on_member("pool", member("a", leaving=True)) == []
    assert targets(router.route([call("3"), call("4")], START)[0]) == [("b", ["3", "4"])]
    assert errors(router.on_reply(to_a.number, "a", [(0, True, b"answer")])) == [None]


def test_what_was_not_delivered_goes_to_the_next_until_none_is_left() -> None:
    router = router_with("a", "b")
    (send,), _ = router.route([call("1")], START)
    again, done = router.on_no_responders(send.number, START)
    assert done == []
    (send,), _ = router.route(again, START)
    assert targets([send]) == [("b", ["1"])]
    again, done = router.on_no_responders(send.number, START)
    assert again == []
    assert errors(done) == [NobodyServesError]


def test_a_pinned_call_goes_nowhere_else() -> None:
    router = router_with("a", "b")
    (send,), _ = router.route([call(pinned="b")], START)
    assert targets([send]) == [("b", ["m"])]
    again, done = router.on_no_responders(send.number, START)
    assert again == []
    assert errors(done) == [NotRunError]
    assert errors(router.route([call(pinned="gone")], START)[1]) == [NotRunError]


def test_after_a_reconnect_members_are_given_time_to_come_back() -> None:
    router = router_with("a")
    router.on_reconnected(START)
    (send,), _ = router.route([call("1")], START)
    again, done = router.on_no_responders(send.number, START)
    assert (again, done) == ([], [])
    assert router.paused() == ["pool"]
    assert router.route([call("2")], START) == ([], [])  # it does not overtake
    router.resume("pool")
    (send,), _ = router.route_waiting("pool", START)
    assert targets([send]) == [("a", ["1"])]
    late = START.after(RECONNECT_GRACE_S + 1)
    assert errors(router.on_no_responders(send.number, late)[1]) == [NobodyServesError]


def test_after_a_reconnect_one_call_alone_shows_whether_a_member_listens() -> None:
    router = router_with("a")
    router.on_reconnected(START)
    (first,), _ = router.route([call("1"), call("2"), call("3")], START)
    assert targets([first]) == [("a", ["1"])]
    assert router.route([call("4")], START) == ([], [])
    router.resume("pool")  # it did not come back
    sends, _ = router.route_waiting("pool", START)
    assert targets(sends) == [("a", ["2", "3", "4"])]
    assert targets(router.route([call("5")], START)[0]) == [("a", ["5"])]
    router.on_reconnected(START)
    sends, _ = router.route([call("6"), call("7")], START)
    assert targets(sends) == [("a", ["6"])]


def test_a_call_that_later_ones_have_overtaken_is_not_run() -> None:
    router = router_with("a")
    router.on_reconnected(START)
    router.route([call("0")], START)
    router.resume("pool")
    (first,), _ = router.route([call("1")], START)
    (second,), _ = router.route([call("2")], START)
    (third,), _ = router.route([call("3")], START)
    router.on_no_responders(first.number, START)
    router.on_no_responders(third.number, START)
    router.on_reply(second.number, "a", [(0, 1, b"")])  # this one found it
    router.resume("pool")
    sends, done = router.route_waiting("pool", START)
    assert errors(done) == [NotRunError]
    assert targets(sends) == [("a", ["3"])]


def test_a_broadcast_after_a_reconnect_asks_each_member_by_itself() -> None:
    router = router_with("a", "b")
    router.on_reconnected(START)
    sends, _ = router.route([broadcast([])], START)
    assert targets(sends) == [("a", ["all"]), ("b", ["all"])]


def test_a_broadcast_that_nobody_hears_tells_of_each_member() -> None:
    router = router_with("a", "b")
    (send,), _ = router.route([broadcast([])], START)
    again, done = router.on_no_responders(send.number, START)
    assert done == []
    sends, _ = router.route(again, START)
    assert targets(sends) == [("a", ["all"]), ("b", ["all"])]
    assert [errors(router.on_no_responders(each.number, START)[1]) for each in sends] == [[NotRunError]] * 2


def test_who_dies_fails_only_its_own_calls() -> None:
    router = router_with("a", "b")
    opened: list[ActorFuture[Any]] = []
    (to_a, to_b, to_all), _ = router.route([call("1"), call("2"), broadcast(opened)], START)
    done = router.on_member_gone("pool", "a")
    assert errors(done) == [ActorDiedError] * 2
    assert [str(each.call) for each in done] == ["pool.1", "pool.all"]
    assert len(router.on_reply(to_b.number, "b", [(0, True, b"")])) == 1
    assert len(router.on_reply(to_all.number, "b", [(0, True, b"")])) == 1
    assert router.on_reply(to_a.number, "a", [(0, True, b"")]) == []
    assert router.out() == []


def test_a_member_that_lost_its_connection_fails_what_was_sent_before() -> None:
    router = router_with("a")
    router.route([call("before")], START)
    router.route([call("after")], START.after(2))
    done = router.on_member("pool", member("a", disconnected_at=START.after(1)))
    assert [(str(each.call), type(each.error)) for each in done] == [("pool.before", ConnectionLostError)]
    assert router.on_member("pool", member("a", disconnected_at=START.after(1))) == []


def test_a_member_that_was_away_fails_the_broadcasts_that_it_may_have_missed() -> None:
    router = router_with("a", "b")
    for at_s in (2, 4):
        router.route([call(f"{at_s}"), broadcast([])], START.after(at_s))
    back = replace(member("a", disconnected_at=START.after(1)), reconnected_at=START.after(3))
    done = router.on_member("pool", back)
    assert [(str(each.call), type(each.error)) for each in done] == [("pool.all", ConnectionLostError)]
    assert len(router.out()) == 5  # the broadcast's other half, and what was sent to one member or later


def test_a_lost_connection_fails_what_is_out_and_keeps_what_waits() -> None:
    router = router_with()
    router.open_pool("pool", RoundRobin())  # whose members are not known yet
    router.route([call("waits")], START)
    assert router.on_disconnected() == []
    router.on_member("pool", member("a"))
    router.on_known("pool")
    assert targets(router.route_waiting("pool", START)[0]) == [("a", ["waits"])]


def test_what_could_not_be_sent_is_routed_again() -> None:
    router = router_with("a", "b")
    (send, _), _ = router.route([call("1"), call("2")], START)
    assert [each.method for each in router.take_back(send.number)] == ["1"]
    assert router.take_back(send.number) == []
    (send,), _ = router.route([broadcast([])], START)
    assert [each.pinned for each in router.take_back(send.number)] == ["a", "b"]


def test_a_cancelled_call_is_not_sent_and_of_a_sent_one_its_actor_is_told() -> None:
    router = router_with("a", "b")
    early, first, second, third = call("1"), call("2"), call("3"), call("4")
    assert future_of(early).cancel()
    (to_b, to_a), _ = router.route([early, first, second, third], START)
    assert targets([to_b, to_a]) == [("b", ["2", "4"]), ("a", ["3"])]
    assert future_of(first).cancel()
    assert future_of(third).cancel()
    (cancel,) = router.withdraw([early, first, third])
    assert (cancel.member.endpoint_id, cancel.calls) == ("b", [(to_b.number, 0), (to_b.number, 1)])
    assert cancel.number > to_a.number
    assert router.withdraw([first, third]) == []
    assert router.out() == [first, third, second]  # its actor may still be at them
    assert [each.call for each in router.on_reply(to_b.number, "b", [(1, False, b"")])] == [third]
    assert [each.call for each in router.on_member_gone("pool", "b")] == [first]


def test_a_cancelled_answer_of_a_broadcast_tells_one_member() -> None:
    router = router_with("a", "b")
    opened: list[ActorFuture[Any]] = []
    (send,), _ = router.route([broadcast(opened)], START)
    assert opened[1].cancel()
    (cancel,) = router.withdraw([each for each in send.calls if each.ticket is opened[1]])
    assert (cancel.member.endpoint_id, cancel.calls) == ("b", [(send.number, 0)])


def test_many_cancels_travel_in_messages_of_a_bounded_size() -> None:
    router = router_with("a")
    calls = [call() for _ in range(MAX_CANCELS + 1)]
    router.route(calls, START)
    for each in calls:
        future_of(each).cancel()
    assert [len(cancel.calls) for cancel in router.withdraw(calls)] == [MAX_CANCELS, 1]


def test_a_call_that_timed_out_is_passed_over_and_its_answer_dropped() -> None:
    router = Router()
    router.open_pool("pool", RoundRobin())
    first, second = call("1"), call("2")
    assert router.route([first, second], START) == ([], [])
    assert router.on_timeout(first) == []
    router.on_member("pool", member("a"))
    router.on_known("pool")
    (send,), _ = router.route_waiting("pool", START)
    assert targets([send]) == [("a", ["2"])]
    assert [cancel.calls for cancel in router.on_timeout(second)] == [[(send.number, 0)]]
    assert router.on_reply(send.number, "a", [(0, True, b"")]) == []


def test_a_call_is_alone_where_nothing_of_its_pool_is_unanswered() -> None:
    router = router_with("a", "b")
    router.open_pool("other", RoundRobin())
    chosen = [router.choose_alone(call(), START) for _ in range(3)]
    assert [to(each) for each in chosen] == ["a", "b", "a"]
    ((send,), _) = router.route([call()], START)
    assert router.choose_alone(call(), START) is None
    assert router.choose_alone(call(pinned="b"), START) is None
    assert to(router.choose_alone(call(pinned="a"), START)) == "a"
    assert router.choose_alone_all(broadcast([]), START) is None
    router.on_reply(send.number, "b", [(0, True, b"")])
    assert to(router.choose_alone(call(pinned="b"), START)) == "b"
    assert (
        router.choose_alone(Call("other", "m", b"", future("other.m")), START) is None
    )  # its members are not known yet
    all_ = router.choose_alone_all(broadcast([]), START)
    assert all_ is not None
    assert (to(all_.make_calls()), list(all_.make_calls().calls)) == ("all", ["a", "b"])
    router.on_reconnected(START)
    assert router.choose_alone_all(broadcast([]), START) is None  # one that is on its way back would not be noticed


def test_a_call_that_was_alone_is_one_of_the_routers_once_it_is_taken_in() -> None:
    ends: list[tuple[Callable[[Router], Sequence[Done | Part]], type[Exception]]] = [
        (lambda router: router.on_member_gone("pool", "a"), ActorDiedError),
        (lambda router: router.on_disconnected(lambda number: number < 0), ConnectionLostError),
        (lambda router: router.close_pool("pool", ActorNotFoundError("shut down")), ActorNotFoundError),
    ]
    for happens, error in ends:
        router = router_with("a", "b")
        alone = call()
        chosen = router.choose_alone(alone, START)
        assert chosen is not None
        assert router.take_in(-1, chosen) == []
        assert router.on_disconnected() == []
        assert errors(happens(router)) == [error]
        router.sanity_check()
    router = router_with("a", "b")
    chosen = router.choose_alone(call(), START)
    assert chosen is not None
    router.close_pool("pool", ActorNotFoundError("closed"))
    router.open_pool("pool", RoundRobin())
    assert errors(router.take_in(-2, chosen)) == [ActorNotFoundError]
    router = router_with("a", "b")
    alone = call()
    chosen = router.choose_alone(alone, START)
    assert chosen is not None
    assert router.take_in(-1, chosen) == []
    again, done = router.on_no_responders(-1, START)
    assert (again, done) == ([alone], [])
    assert targets(router.route(again, START)[0]) == [("b", ["m"])]


def test_a_broadcast_that_was_alone_is_one_of_the_routers_once_it_is_taken_in() -> None:
    router = router_with("a", "b", "c")
    opened: list[ActorFuture[Any]] = []
    carried = router.choose_alone_all(broadcast(opened), START)
    assert carried is not None
    assert carried.take("b", codec.encode(3))
    assert router.take_in(-1, carried.make_calls()) == []
    assert [each.done() for each in opened] == [False, True, False]
    assert opened[1].result() == 3
    router.sanity_check()
    assert errors(router.on_member_gone("pool", "a")) == [ActorDiedError]
    assert errors(router.on_reply(-1, "c", [(0, True, b"")])) == [None]
    assert router.out() == []
    router.sanity_check()


def test_a_closed_pool_ends_everything() -> None:
    router = Router()
    router.open_pool("pool", RoundRobin())
    router.route([call(), call()], START)
    assert errors(router.close_pool("pool", ActorNotFoundError("closed"))) == [ActorNotFoundError] * 2
    assert errors(router.route([call()], START)[1]) == [ActorNotFoundError]


def full(send: Send) -> list[WireReply]:
    return [(index, False, FULL_REPLY) for index in range(len(send.calls))]


def test_calls_that_wait_for_room_follow_the_answers_in_order() -> None:
    router = router_with("a")
    (plain,), _ = router.route([call("plain")], START)
    (send,), _ = router.route([call(str(number), waits=True) for number in range(5)], START)
    assert router.on_reply(send.number, "a", full(send)) == []
    assert router.turned_away() == ["pool"]
    assert (router.bytes_out, router.bytes_turned_away) == (1, 5)
    assert router.route([call("5", waits=True)], START) == ([], [])  # it does not overtake
    assert router.route_waiting("pool", START) == ([], [])
    router.on_reply(plain.number, "a", [(0, True, b"")])
    sends, _ = router.route_waiting("pool", START)
    assert targets(sends) == [("a", ["0", "1"])]
    router.on_reply(sends[0].number, "a", [(0, True, b""), (1, True, b"")])
    sends, _ = router.route_waiting("pool", START)
    assert targets(sends) == [("a", ["2", "3", "4", "5"])]
    router.on_reply(sends[0].number, "a", [(index, True, b"") for index in range(4)])
    assert router.turned_away() == []
    assert (router.bytes_out, router.bytes_turned_away) == (0, 0)


def test_one_that_does_not_wait_is_told_of_the_full_mailbox_also_while_others_wait() -> None:
    router = router_with("a")
    (send,), _ = router.route([call("waits", waits=True), call("not")], START)
    assert [str(each.call) for each in router.on_reply(send.number, "a", full(send))] == ["pool.not"]
    assert targets(router.route([call("not either")], START)[0]) == [("a", ["not either"])]


def test_where_one_mailbox_is_full_another_is_tried_at_once() -> None:
    router = router_with("a", "b")
    (send,), _ = router.route([call("1", waits=True)], START)
    assert router.on_reply(send.number, "a", full(send)) == []
    (send,), _ = router.route_waiting("pool", START)
    assert targets([send]) == [("b", ["1"])]
    assert router.on_reply(send.number, "b", full(send)) == []
    assert router.route_waiting("pool", START) == ([], [])
    router.probe("pool")
    (send,), _ = router.route_waiting("pool", START)
    assert targets([send]) == [("a", ["1"])]


class Histories(RuleBasedStateMachine):
    """A client, its members and the bus, in whichever order things happen."""

    names = st.sampled_from(["a", "b", "c"])

    @initialize(policy=st.sampled_from([RoundRobin, LeastOutstanding, lambda: Random(seed=0)]))
    def begin(self, policy: Callable[[], Policy]) -> None:
        self.now = START
        self.router = Router()
        self.router.open_pool("pool", policy())
        self.messages: dict[int, Send] = {}
        self.issued: list[Call] = []
        self.futures: list[ActorFuture[Any]] = []
        self.ended: list[Call | Broadcast] = []
        self.present: set[str] = set()
        self.sent: dict[str, list[int]] = {}  # {endpoint id: orders of calls that were sent there once}

    # ---- what the shell does

    def end(self, done: Sequence[Done | Part]) -> None:
        for each in done:
            if isinstance(each, Part):
                assert each.call not in self.ended
                continue
            assert each.call not in self.ended, f"{each.call} ended twice"
            self.ended.append(each.call)
            if isinstance(each.call, Call):
                assert each.call.over
                if each.call.begun or each.call.ticket.begin(each.call):
                    each.call.ticket.set_exception(each.error or RuntimeError("answered"))

    def send(self, outcome: tuple[list[Send], list[Done]]) -> None:
        sends, done = outcome
        self.end(done)
        for send in sends:
            assert send.calls
            assert all(each.begun and not each.over for each in send.calls)
            assert not any(each in self.ended for each in send.calls)
            self.messages[send.number] = send
            if send.member is not None:
                orders = self.sent.setdefault(send.member.endpoint_id, [])
                new = [each.order for each in send.calls if not (each.tried or each.pinned or each.waits)]
                assert new == sorted(new)
                orders += new

    # ---- what happens

    @rule(name=names, leaving=st.booleans())
    def join(self, name: str, leaving: bool) -> None:
        self.present.add(name)
        self.end(self.router.on_member("pool", member(name, leaving=leaving)))
        self.send(self.router.route_waiting("pool", self.now))

    @rule(name=names)
    def reconnect_of_member(self, name: str) -> None:
        if name in self.present:
            self.end(self.router.on_member("pool", member(name, disconnected_at=self.now)))

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.present.discard(name)
        self.end(self.router.on_member_gone("pool", name))

    @rule()
    def become_known(self) -> None:
        self.router.on_known("pool")
        self.send(self.router.route_waiting("pool", self.now))

    @rule(pins=st.lists(st.sampled_from([None, None, None, "a", "b"]), min_size=1, max_size=5), waits=st.booleans())
    def submit(self, pins: list[str | None], waits: bool) -> None:
        calls = [call(pinned=pin, waits=waits) for pin in pins]
        self.issued += calls
        self.send(self.router.route(calls, self.now))

    @rule(pin=st.sampled_from([None, None, "a"]), is_plain=st.booleans(), member_goes=st.booleans())
    def carry_alone(self, pin: str | None, is_plain: bool, member_goes: bool) -> None:
        """A thread sends a call by itself; anything but a plain result hands it over to the router."""
        alone = call(pinned=pin)
        busy = [found[0].endpoint_id for each in self.router.out() if (found := self.router.where(each)) is not None]
        chosen = self.router.choose_alone(alone, self.now)
        if chosen is None or is_plain:
            return
        assert pin not in busy if pin is not None else not busy  # nothing that it could overtake
        assert chosen.member is not None
        if member_goes:
            self.leave(chosen.member.endpoint_id)
        self.issued.append(alone)
        number = -len(self.issued)
        self.end(self.router.take_in(number, chosen))
        self.messages[number] = Send(number, "pool", chosen.member, [alone])

    @rule()
    def lose_the_lane(self) -> None:
        self.end(self.router.on_disconnected(lambda number: number < 0))
        assert all(each.number is not None and each.number > 0 for each in self.router.out())

    @rule()
    def broadcast(self) -> None:
        self.send(self.router.route([broadcast([])], self.now))

    @precondition(lambda self: bool(self.messages))
    @rule(
        data=st.data(), whole=st.booleans(), parts_before=st.integers(0, 2), ends=st.sampled_from([True, True, False])
    )
    def reply(self, data: st.DataObject, whole: bool, parts_before: int, ends: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.messages)))
        send = self.messages[number]
        indexes = range(len(send.calls)) if whole else [data.draw(st.integers(0, len(send.calls) - 1))]
        endpoint_id = send.member.endpoint_id if send.member else data.draw(self.names)
        parts = [(index, ITEMS, (0, [b""])) for index in indexes for _ in range(parts_before)]
        replies = parts + [(index, True, b"") for index in indexes if ends]
        self.end(self.router.on_reply(number, endpoint_id, replies))
        self.send(self.router.route_waiting("pool", self.now))

    @precondition(lambda self: bool(self.messages))
    @rule(data=st.data())
    def mailbox_is_full(self, data: st.DataObject) -> None:
        send = self.messages[data.draw(st.sampled_from(sorted(self.messages)))]
        endpoint_id = send.member.endpoint_id if send.member else data.draw(self.names)
        self.end(self.router.on_reply(send.number, endpoint_id, full(send)))
        self.send(self.router.route_waiting("pool", self.now))

    @rule()
    def probe(self) -> None:
        self.router.probe("pool")
        self.send(self.router.route_waiting("pool", self.now))

    @precondition(lambda self: bool(self.messages))
    @rule(data=st.data())
    def nobody_listens(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.messages)))
        again, done = self.router.on_no_responders(number, self.now)
        self.end(done)
        self.send(self.router.route(again, self.now))

    @precondition(lambda self: bool(self.messages))
    @rule(data=st.data())
    def sending_fails(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.messages)))
        self.send(self.router.route(self.router.take_back(number), self.now))

    @rule()
    def lose_and_find_the_connection(self) -> None:
        self.end(self.router.on_disconnected())
        assert all(each.number is not None and each.number < 0 for each in self.router.out())
        self.router.on_reconnected(self.now)

    @rule()
    def resume(self) -> None:
        self.router.resume("pool")
        self.send(self.router.route_waiting("pool", self.now))

    @precondition(lambda self: bool(self.issued))
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        late = data.draw(st.sampled_from(self.issued))
        if late not in self.ended and not future_of(late).cancelled():
            self.router.on_timeout(late)
            self.end([Done(late, ok=False, error=TimeoutError())])

    @precondition(lambda self: bool(self.issued))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        unwanted = data.draw(st.sampled_from(self.issued))
        number, ended = unwanted.number, unwanted in self.ended
        again = future_of(unwanted).cancelled()
        assert future_of(unwanted).cancel() == (again or not ended)
        cancels = self.router.withdraw([unwanted])
        if number is None or ended or again:
            assert cancels == []
            return
        ((_number, told, ((message, place),)),) = cancels
        send = self.messages[message]
        assert (message, send.calls[place]) == (number, unwanted)
        assert send.member is not None
        assert told.endpoint_id == send.member.endpoint_id

    @rule(seconds=st.sampled_from([0.001, 0.1, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now = self.now.after(seconds)

    # ---- what always holds

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "router"):
            self.router.sanity_check()

    @invariant()
    def each_call_is_in_one_place(self) -> None:
        if not hasattr(self, "router"):
            return
        out, waiting = self.router.out(), self.router.waiting()
        for each in self.issued:
            places = [each in out, each in waiting and not each.over, each in self.ended]
            assert sum(places) == 1 or future_of(each).cancelled(), f"{places} {each}"

    def teardown(self) -> None:
        if hasattr(self, "router"):
            self.end(self.router.close(RuntimeError("closed")))
            assert all(each in self.ended or future_of(each).cancelled() for each in self.issued)
            assert (self.router.bytes_out, self.router.bytes_turned_away) == (0, 0)
            assert self.router.out() == []


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=40)
