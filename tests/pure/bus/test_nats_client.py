"""The parts of nats-py that are not public and that `fluster_bus.connection.nats_client` uses or replaces.

A release of nats-py that changes one of them fails here, and not in a cluster: see what it does now, and change both.
"""

from __future__ import annotations

import inspect

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

# {method: its parameters}
_CALLED = {
    "_process_msg": ["sid", "subject", "reply", "data", "headers"],
    "_process_ping": [],
    "_process_pong": [],
    "_process_err": ["err_msg"],
    "_send_unsubscribe": ["sid", "limit"],
}
_OF_A_SUBSCRIPTION_CALLED: dict[str, list[str]] = {"_stop_processing": []}
_REPLACED = {
    "_process_headers": ["headers"],
    "_build_message": ["sid", "subject", "reply", "data", "headers"],
    "_connect_to_server": ["s"],
    "_process_connect_init": [],
    "_process_info": ["info", "initial_connection"],
    "_close": ["status", "do_cbs"],
    "request": ["subject", "payload", "timeout", "old_style", "headers"],
    "drain": [],
    "_flush_pending": ["force_flush"],
    "_remove_sub": ["sid", "max_msgs"],
}
_OF_CLIENT = {
    "_ps",
    "_pongs",
    "_transport",
    "_current_server",
    "_pending",
    "_pending_data_size",
    "_subs",
    "_status",
    "_flush_queue",
}
_OF_SUBSCRIPTION = {"_id", "_wait_for_msgs_task", "_pending_queue", "_closed"}


@pytest.mark.parametrize(("name", "parameters"), [*_CALLED.items(), *_REPLACED.items()])
def test_a_method_that_is_not_public_is_as_it_was(name: str, parameters: list[str]) -> None:
    method = getattr(Client, name)
    assert inspect.iscoroutinefunction(method) == (name not in ("_build_message", "_remove_sub"))
    assert list(inspect.signature(method).parameters)[1:] == parameters


@pytest.mark.parametrize(("name", "parameters"), _OF_A_SUBSCRIPTION_CALLED.items())
def test_a_method_of_a_subscription_that_is_not_public_is_as_it_was(name: str, parameters: list[str]) -> None:
    method = getattr(Subscription, name)
    assert not inspect.iscoroutinefunction(method)
    assert list(inspect.signature(method).parameters)[1:] == parameters


def test_attributes_that_are_not_public_are_there() -> None:
    client = Client()
    assert vars(client).keys() >= _OF_CLIENT
    assert (client._pending, client._pending_data_size, client._subs) == ([], 0, {})  # noqa: SLF001 - nats-py's own, which ours must agree with
    assert isinstance(client._ps, Parser)  # noqa: SLF001 - nats-py's own, which ours must agree with
    assert vars(Subscription(client, 1)).keys() >= _OF_SUBSCRIPTION


def test_a_parser_is_asked_as_it_was() -> None:
    assert inspect.iscoroutinefunction(Parser.parse)
    assert list(inspect.signature(Parser.parse).parameters) == ["self", "data"]
    assert list(inspect.signature(Parser.reset).parameters) == ["self"]
