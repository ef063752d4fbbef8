"""Guards: the names that users import."""

import ast
import subprocess
import sys
from pathlib import Path

import fluster

SOURCE = Path(fluster.__file__).read_text(encoding="utf-8")


_SDK = """
    Cluster LocalCluster AsyncCluster current_cluster
    JobRequest JobInfo JobStatus TaskStatus Entrypoint EnvironmentConfig create_environment
    ResourceConfig CpuConfig GpuConfig TpuConfig TpuTopologyInfo
    Endpoint JobId Namespace WorkerId EndpointId
    actor method deploy ActorServer ActorContext ActorPool ClusterResolver FixedResolver Resolver WorkerPool
"""


def _imported_for_type_checkers() -> dict[str, str]:
    """{name: module} as type checkers see it."""
    return {
        alias.name: node.module or ""
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fluster")
        for alias in node.names
    }


def test_every_public_name_is_what_type_checkers_take_it_for() -> None:
    imported = _imported_for_type_checkers()
    assert sorted(imported) == sorted(fluster.__all__)
    for name, module in imported.items():
        assert getattr(fluster, name) is getattr(sys.modules[module], name), name


def test_the_names_of_the_sdk_are_all_there() -> None:
    names = _SDK.split()
    assert set(names) <= set(fluster.__all__)
    assert set(fluster.__all__) <= set(dir(fluster))


def test_errors_are_exported_whole() -> None:
    import fluster.errors

    assert set(fluster.errors.__all__) <= set(fluster.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(fluster, "Clutser")


def test_names_come_by_a_star_import_too() -> None:
    script = "from fluster import *; print(LocalCluster.__name__, actor.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["LocalCluster", "actor"]


def test_the_command_line_starts_without_the_sdk() -> None:
    script = "import sys, fluster.cli; print([name for name in ('pydantic', 'nats', 'anyio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_whoever_runs_pytest_waits_for_nothing_of_the_sdk() -> None:
    script = "import sys, fluster.pytest_plugin; print([name for name in ('pydantic', 'nats', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_is_started_before_anything_else_is_imported() -> None:
    """Importing the rest takes longer than a server needs to come up."""
    script = "import sys, fluster_services.supervisor; print([name for name in ('pydantic', 'nats', 'anyio') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_script_can_start_its_cluster_before_anything_else_is_imported() -> None:
    """What takes long is imported while the cluster comes up."""
    script = """
import sys
from fluster import LocalCluster, actor, deploy, method

@actor(max_restarts=1)
class Echo:
    @method(timeout=3)
    def echo(self, value): ...

print([name for name in ("pydantic", "nats", "uvloop", "fluster_bus.messages") if name in sys.modules])
from fluster.later import import_now
import_now()
print([name for name in ("pydantic", "nats", "fluster.actors.pool.pool") if name not in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
