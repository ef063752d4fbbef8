"""docker-compose.yml, read as Compose would: what it starts, what it opens, what it gives away."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_the_bus_a_controller_and_a_worker_are_started() -> None:
    assert set(SERVICES) == {"nats", "controller", "worker"}


@pytest.mark.parametrize("name", ["controller", "worker"])
def test_daemons_are_modules_that_exist(name: str) -> None:
    python, flag, module = SERVICES[name]["command"]
    assert (python, flag) == ("python", "-m")
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_each_service_is_watched_and_started_again(service: dict[str, Any]) -> None:
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"


def test_ports_are_published_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_passwords_have_no_default() -> None:
    used = re.findall(r"\$\{(\w*(?:PASSWORD|TOKEN|SECRET)\w*)(.*?)\}", TEXT)
    assert used
    assert [name for name, rest in used if not rest.startswith(":?")] == []


def test_what_is_mounted_or_built_from_is_here() -> None:
    mounted = [
        volume.split(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]
    built = [service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service]
    assert [path for path in mounted + built if not (ROOT / path).is_file()] == []


def test_the_store_is_a_named_volume() -> None:
    assert "nats-store:/data" in SERVICES["nats"]["volumes"]
    assert "nats-store" in COMPOSE["volumes"]
