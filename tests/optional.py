"""What a test needs and is not there everywhere."""

import importlib
import os
from typing import NoReturn

import pytest

REQUIRE_VARIABLE = "FLUSTER_REQUIRE"  # names, divided by commas, of what must not be missing


def is_required(name: str) -> bool:
    """Whether tests that need it must not be skipped here."""
    return name in os.environ.get(REQUIRE_VARIABLE, "").split(",")


def skip(name: str, why: str) -> NoReturn:
    """Skip a test that needs what `name` stands for; where FLUSTER_REQUIRE names it the test fails."""
    if is_required(name):
        pytest.fail(f"{REQUIRE_VARIABLE} wants {name}: {why}", pytrace=False)
    pytest.skip(why)


def import_or_skip(package: str, remedy: str) -> None:
    """Skip the tests of a module without the package; where FLUSTER_REQUIRE names it they fail."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        if is_required(package):
            raise
        pytest.skip(f"{error}: {remedy}", allow_module_level=True)
