"""The permission lists as data, and the configuration that is made of them."""

import re
from pathlib import Path

import pytest

from fluster_bus import server_configuration, server_sections
from fluster_bus.core import roles, server_subjects, subjects
from fluster_bus.core.errors import InvalidNameError
from fluster_bus.core.roles import Role, User

ROOT = Path(__file__).parents[3]
NAMESPACES = ("default", "team-a")
TENANTS = [user for user in roles.users(NAMESPACES) if user.role.is_tenant]


def test_each_namespace_has_a_client_and_a_job() -> None:
    assert [user.name for user in roles.users(NAMESPACES)] == [
        "service",
        "worker",
        "gateway",
        "autoscaler",
        "operator",
        "client_default",
        "job_default",
        "client_team-a",
        "job_team-a",
    ]


@pytest.mark.parametrize(
    ("role", "namespace"),
    [(Role.SERVICE, "default"), (Role.OPERATOR, "default"), (Role.JOB, None), (Role.JOB, "sys"), (Role.JOB, "a.b")],
)
def test_a_user_that_cannot_be_is_refused(role: Role, namespace: str | None) -> None:
    with pytest.raises(InvalidNameError):
        User(role, namespace)


@pytest.mark.parametrize("user", TENANTS, ids=lambda user: user.name)
def test_tenants_reach_their_own_namespace_only(user: User) -> None:
    allowed = server_configuration.permissions(user, NAMESPACES)
    others = set(NAMESPACES) - {user.namespace}
    for subject in (*allowed.publish, *allowed.subscribe):
        first, _, rest = subject.partition(".")
        if first == "fluster":
            assert rest.startswith(f"{user.namespace}."), subject
        assert not any(other in subject for other in others), subject


@pytest.mark.parametrize("user", TENANTS, ids=lambda user: user.name)
def test_tenants_hear_their_own_inbox_only_and_never_send_to_the_services(user: User) -> None:
    allowed = server_configuration.permissions(user, NAMESPACES)
    assert [subject for subject in allowed.subscribe if subjects.is_inbox(subject)] == [user.inbox]
    answered = [subject for subject in allowed.publish if subjects.is_inbox(subject)]
    assert answered == [subjects.inboxes_of(user.namespace or ""), *subjects.PLAIN_INBOXES]


@pytest.mark.parametrize("user", TENANTS, ids=lambda user: user.name)
def test_tenants_ask_jetstream_for_nothing_but_direct_reads(user: User) -> None:
    asked = [
        subject for subject in server_configuration.permissions(user, NAMESPACES).publish if subject.startswith("$JS.")
    ]
    assert asked
    assert all(subject.startswith(server_subjects.direct_get("")) for subject in asked)


def test_a_client_serves_nothing_and_writes_no_registry() -> None:
    client = server_configuration.permissions(User(Role.CLIENT, "default"), NAMESPACES)
    job = server_configuration.permissions(User(Role.JOB, "default"), NAMESPACES)
    assert set(job.publish) - set(client.publish) == {
        "$KV.fluster_endpoints_default.>",
        # for actors that are one of their kind, and for those whose calls are stored
        "$KV.fluster_actors_default.>",
        "$JS.API.DIRECT.GET.KV_fluster_actors_default",
        "$JS.API.DIRECT.GET.KV_fluster_actors_default.>",
        "$JS.API.DIRECT.GET.FLUSTER_CALLS_default",
        "$JS.API.DIRECT.GET.FLUSTER_CALLS_default.>",
        "fluster.default.trim-calls",
    }
    assert set(client.subscribe) == {"_INBOX.default.client_default.>", "fluster.default.watch.>"}
    assert "fluster.default.actors.>" in job.subscribe


def test_services_answer_every_user() -> None:
    publish = server_configuration.permissions(User(Role.SERVICE), NAMESPACES).publish
    assert subjects.ALL_INBOXES in publish


@pytest.mark.parametrize(
    ("text", "expected"), [("plain", '"plain"'), ('a"b\\c', '"a\\"b\\\\c"'), ("$HOME", '"$HOME"'), ("a\nb", '"a\\nb"')]
)
def test_quoting(text: str, expected: str) -> None:
    assert server_sections.quoted(text) == expected


def test_the_production_configuration_is_what_the_roles_make() -> None:
    file = ROOT / "bus/nats-server.conf"
    remedy = "run `python -m fluster_bus.server_configuration > bus/nats-server.conf`"
    assert file.read_text(encoding="utf-8") == server_configuration.production_configuration(), remedy


def test_the_configuration_of_three_servers_is_what_the_code_makes() -> None:
    file = Path(__file__).parents[3] / "bus" / "nats-three.conf"
    remedy = "run `python -m fluster_bus.server_configuration --three > bus/nats-three.conf`"
    assert file.read_text(encoding="utf-8") == server_configuration.three_servers_configuration(), remedy


def test_the_production_configuration_encrypts_unless_that_is_not_wanted() -> None:
    plain = server_configuration.production_configuration(tls_folder=None)
    assert "\ntls {" in server_configuration.production_configuration()
    assert "tls {" not in plain
    assert "server_configuration --without-tls`" in plain


@pytest.mark.parametrize("name", ["nats-server.conf", "nats-three.conf"])
def test_the_production_configurations_open_no_port_for_monitoring(name: str) -> None:
    """It would show inboxes to all who reach it."""
    # The server takes `name: value`, `name = value` and `name value`, in any case.
    lines = (ROOT / "bus" / name).read_text(encoding="utf-8").splitlines()
    settings = {re.split(r"[\s:={]", line.strip(), maxsplit=1)[0].strip("\"'").lower() for line in lines}
    assert "jetstream" in settings
    assert {"http", "https", "http_port", "https_port", "monitor_port"}.isdisjoint(settings)


def test_the_production_configuration_holds_no_password() -> None:
    text = server_configuration.production_configuration(NAMESPACES)
    passwords = [line.split(": ")[1] for line in text.splitlines() if line.strip().startswith("password:")]
    assert passwords == [f"${user.password_variable}" for user in roles.users(NAMESPACES)]
    assert "FLUSTER_JOB_TEAM_A_PASSWORD" in text


def test_namespaces_that_would_share_a_password_are_refused() -> None:
    with pytest.raises(InvalidNameError, match="a-b, a_b share the variable FLUSTER_CLIENT_A_B_PASSWORD"):
        server_configuration.production_configuration(("a-b", "a_b"))
