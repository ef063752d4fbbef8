"""Guards: the names that users import."""

import ast
import asyncio
import builtins
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fluster
import fluster_bus.messages

_SDK = """
    Cluster LocalCluster AsyncCluster current_cluster
    JobRequest JobInfo JobStatus TaskStatus Entrypoint EnvironmentConfig create_environment
    ResourceConfig CpuConfig GpuConfig TpuConfig TpuTopologyInfo
    Endpoint JobId Namespace WorkerId EndpointId
    actor method deploy ActorServer ActorContext ActorPool ClusterResolver FixedResolver Resolver WorkerPool
"""


def _imported_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """{name: module} as type checkers see it."""
    source = ast.parse(Path(package.__file__ or "").read_text(encoding="utf-8"))
    (block,) = (each for each in source.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    return {
        alias.name: node.module or ""
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fluster")
        for alias in node.names
    }


@pytest.mark.parametrize("package", [fluster, fluster_bus.messages])
def test_every_public_name_is_what_type_checkers_take_it_for(package: ModuleType) -> None:
    imported = _imported_for_type_checkers(package)
    assert sorted(imported) == sorted(package.__all__)
    for name, module in imported.items():
        assert getattr(package, name) is getattr(sys.modules[module], name), name


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


def test_a_client_of_jobs_imports_none_of_the_messages_of_workers() -> None:
    script = """
import sys
from fluster.cluster.jobs import job_logs, job_requests, submissions
print([name for name in ("namespaces", "nodes", "worker_service", "workers") if f"fluster_bus.messages.{name}" in sys.modules])
"""
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
from fluster_bus.core.lazy_imports import import_now
import_now()
print([name for name in ("pydantic", "nats", "fluster.actors.pool.pool") if name not in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]


# ---- what public methods return and raise -----------------------------------------------------------------

# {method: class}, which other parts of Fluster use: not for users.
_INTERNAL = {"AsyncActorPool.roster": "Roster", "log_chunks": "LogChunk"}
_SPECIAL = {"__enter__", "__aenter__", "__iter__", "__aiter__", "__next__", "__anext__", "__call__"}


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in {"fluster", "fluster_bus"}


@functools.cache
def _imports(module: str) -> dict[str, tuple[str, str]]:
    """{name in the module: (module, name) where it comes from}, with those for type checkers."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _methods(thing: type | Callable[..., object]) -> Iterator[tuple[str, Callable[..., object]]]:
    """The public methods and properties of a class, by `Class.method`; a function is itself."""
    if not isinstance(thing, type):
        yield thing.__name__, thing
        return
    for each in thing.__mro__:
        for name, value in list(vars(each).items()) if _is_ours(each.__module__) else ():
            found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(found) and (not name.startswith("_") or name in _SPECIAL):
                yield f"{thing.__name__}.{name}", inspect.unwrap(found)


def _returned(method: Callable[..., object]) -> Iterator[type]:
    """The classes of Fluster in what a method is said to return."""
    said = method.__annotations__.get("return")
    for node in ast.walk(ast.parse(said, mode="eval")) if isinstance(said, str) else ():
        if isinstance(node, ast.Name):
            module, name = _imports(method.__module__).get(node.id, (method.__module__, node.id))
            found = getattr(importlib.import_module(module), name, None) if _is_ours(module) else None
            if isinstance(found, type) and _is_ours(found.__module__):
                yield found


_PUBLIC = [
    thing for name in fluster.__all__ if inspect.isfunction(thing := getattr(fluster, name)) or isinstance(thing, type)
]


@pytest.mark.parametrize("thing", _PUBLIC, ids=lambda thing: thing.__name__)
def test_what_it_returns_and_raises_can_be_imported_from_fluster(thing: type | Callable[..., object]) -> None:
    exported = {getattr(fluster, name) for name in fluster.__all__}
    missing = set()
    for label, method in _methods(thing):
        internal = {_INTERNAL.get(label), _INTERNAL.get(label.rpartition(".")[2])}
        missing |= {
            f"{label} returns {found.__name__}"
            for found in _returned(method)
            if found not in exported and found.__name__ not in internal
        }
        missing |= {
            f"{label} raises {name}"
            for name in re.findall(r"\b[A-Z]\w*Error\b", method.__doc__ or "")
            if name not in fluster.__all__ and not hasattr(builtins, name) and not hasattr(asyncio, name)
        }
    assert not missing, "export them in fluster/__init__.py:\n" + "\n".join(sorted(missing))


def test_the_walk_sees_what_blocking_methods_and_properties_return() -> None:
    returned = {label: {each.__name__ for each in _returned(method)} for label, method in _methods(fluster.Cluster)}
    assert returned["Cluster.poll"] == {"JobInfo"}
    assert returned["Cluster.list_nodes"] == {"NodeStatus"}
