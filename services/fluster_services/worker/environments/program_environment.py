"""The environment of the program that owns a cluster of this machine, as its tasks get it."""

from __future__ import annotations

from collections.abc import Mapping

from fluster_bus.core.names import is_secret_name

_NOT_PASSED_ON = ("FLUSTER_", "SLURM_")  # they say who the program itself is


def program_environment(variables: Mapping[str, str], *, with_secrets: bool) -> dict[str, str]:
    """`variables` without those that are about the program itself, and its import path.

    Without `with_secrets`, those with names like *TOKEN*, *SECRET*, *KEY* and *PASSWORD* are left out as well.
    """
    return {
        name: value
        for name, value in variables.items()
        if not name.startswith(_NOT_PASSED_ON) and name != "PYTHONPATH" and (with_secrets or not is_secret_name(name))
    }
