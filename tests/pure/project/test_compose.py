"""docker-compose.yml, read as Compose would: what it starts, what it opens, what it gives away."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fluster_bus import server_configuration
from fluster_bus.server_configuration import PASSWORDS_FILE

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


SERVERS = [name for name in SERVICES if name.startswith("nats")]


def test_the_bus_a_controller_and_a_worker_are_started() -> None:
    assert {name for name, service in SERVICES.items() if "profiles" not in service} == {"nats", "controller", "worker"}


def test_the_profile_three_adds_two_servers_that_answer_to_the_name_of_the_first_one() -> None:
    further = [name for name, service in SERVICES.items() if service.get("profiles") == ["three"]]
    assert further == ["nats-2", "nats-3"]
    own = {"nats": {"nats", "nats-1"}, "nats-2": {"nats-2", "nats"}, "nats-3": {"nats-3", "nats"}}
    assert {name: {name, *SERVICES[name]["networks"]["default"]["aliases"]} for name in SERVERS} == own
    names = [SERVICES[name]["environment"]["SERVER_NAME"] for name in SERVERS]
    assert names == ["nats-1", "nats-2", "nats-3"] == list(server_configuration.THREE_SERVERS)
    assert {SERVICES[name]["command"][1] for name in further} == {"/etc/nats/nats-three.conf"}
    assert SERVICES["nats"]["command"][1] == "/etc/nats/nats-${COMPOSE_PROFILES:-server}.conf"
    stores = [volume for name in SERVERS for volume in SERVICES[name]["volumes"] if str(volume).endswith(":/data")]
    assert len(set(stores)) == 3


def test_daemons_and_servers_speak_tls() -> None:
    for name in ("controller", "worker"):
        assert SERVICES[name]["environment"]["FLUSTER_CLUSTER_ADDRESS"] == "tls://nats:4222"
    for name in SERVERS:
        (certificate,) = [each for each in SERVICES[name]["volumes"] if isinstance(each, dict)]
        assert (certificate["target"], certificate["read_only"]) == (server_configuration.TLS_FOLDER, True)


@pytest.mark.parametrize("name", ["controller", "worker"])
def test_daemons_are_modules_that_exist(name: str) -> None:
    python, flag, module = SERVICES[name]["command"]
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_each_service_is_watched_and_started_again(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_passwords_are_in_files_of_their_own_and_each_has_those_that_it_needs() -> None:
    assert not re.search(r"\$\{\w*(PASSWORD|TOKEN|SECRET)", TEXT)
    assert {name: service.get("secrets") for name, service in SERVICES.items()} == {
        **{name: ["passwords"] for name in SERVERS},
        "controller": ["service"],
        "worker": ["worker", "job_default"],
    }
    files = [secret["file"].rpartition("/")[2] for secret in COMPOSE["secrets"].values()]
    assert files == [PASSWORDS_FILE, "service.json", "worker.json", "job_default.json"]


def test_every_image_is_a_setting() -> None:
    images = [service["image"] for service in SERVICES.values()]
    assert [image for image in images if not re.fullmatch(r"\$\{\w+:-[\w.:-]+\}", image)] == []


def test_the_page_shows_how_each_image_is_named_by_its_digest_in_place_of_its_tag() -> None:
    defaults = dict(re.findall(r"\$\{(\w*IMAGE):-([\w.:-]+)\}", TEXT))
    assert defaults.keys() == {"NATS_IMAGE", "FLUSTER_BASE_IMAGE", "FLUSTER_IMAGE"}
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^\| `(\w*IMAGE)` \| `([\w.:/-]+)@sha256:…` \|", page, re.MULTILINE))
    assert pinned.keys() == defaults.keys()
    for setting in ("NATS_IMAGE", "FLUSTER_BASE_IMAGE"):
        assert pinned[setting] == defaults[setting]


def test_two_controllers_are_started() -> None:
    assert SERVICES["controller"]["deploy"]["replicas"] == 2


def test_what_is_mounted_or_built_from_is_here() -> None:
    mounted = [
        re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if isinstance(volume, str) and volume.startswith(("${", "."))
    ]
    built = [service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service]
    assert [path for path in mounted + built if not (ROOT / path).is_file()] == []


def test_the_store_is_a_named_volume() -> None:
    assert "nats-store:/data" in SERVICES["nats"]["volumes"]
    assert "nats-store" in COMPOSE["volumes"]
