"""A plugin for joblib's own tests of Parallel, with Fluster's backend where they take that of processes, loky's.

Run by test_own_suite.py: `python -m pytest -p tests.system.joblib.own_suite …`. The tests left out must fail, each for its reason.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fluster.cluster import LocalCluster
from fluster.integrations.joblib import FlusterBackend, register

_LOKY = "it looks at what loky keeps in its backend"
_FILES = "it wants arrays in files, which workers on other machines do not have"
_INITIALIZER = (
    "it wants an initializer, which the backend does not have: what workers are to be is given with environment="
)
_ELSEWHERE = "it names the backend in a process of another backend, where nobody has registered it"
_NESTED = "it wants loky's warning that it cannot be used below threads and processes: Fluster's backend can"
_ALONE = "it wants loky's error where a generator that goes takes the executor of another with it: here it does not"
_CHILD = "it gives workers a proxy that only child processes of the test have the key for"
LEFT_OUT = {
    "test_auto_memmap_on_arrays_from_generator[fluster]": _FILES,
    "test_dispatch_multiprocessing[fluster]": _CHILD,
    "test_error_capture[fluster]": _LOKY,
    "test_initializer_context[parallel_backend-fluster-2]": _INITIALIZER,
    "test_initializer_context[parallel_backend-fluster-4]": _INITIALIZER,
    "test_initializer_context[parallel_config-fluster-2]": _INITIALIZER,
    "test_initializer_context[parallel_config-fluster-4]": _INITIALIZER,
    "test_initializer_parallel[fluster-2]": _INITIALIZER,
    "test_initializer_parallel[fluster-4]": _INITIALIZER,
    "test_memmapping_leaks[fluster]": _FILES,
    "test_multiple_generator_call_separated_gc[generator-generator-fluster-True]": _ALONE,
    "test_multiple_generator_call_separated_gc[generator-generator_unordered-fluster-True]": _ALONE,
    "test_multiple_generator_call_separated_gc[generator_unordered-generator-fluster-True]": _ALONE,
    "test_multiple_generator_call_separated_gc[generator_unordered-generator_unordered-fluster-True]": _ALONE,
    "test_nested_loop[back_compat_backend-fluster]": _ELSEWHERE,
    "test_nested_loop[loky-fluster]": _ELSEWHERE,
    "test_nested_parallel_warnings[threading-fluster-True]": _NESTED,
    "test_parallel_as_context_manager[fluster]": _LOKY,
}
# Not run, as they would wait: the workers that the tests share have taken the whole cluster by then.
_FORKED = "it uses the backend in a forked process, which cannot share the workers of its parent"
NOT_RUN = {
    "test_nested_loop[multiprocessing-fluster]": _FORKED,
    "test_nested_parallel_warnings[multiprocessing-fluster-True]": _FORKED,
}
_LONGEST_S = 120
_WORKERS = 4
HALF = "FLUSTER_TEST_HALF"  # of the tests: 0 or 1

_clusters: list[LocalCluster] = []
_kept: list[FlusterBackend] = []


def pytest_sessionstart() -> None:
    import joblib.testing  # which needs pytest to be as lenient as in here

    cluster = LocalCluster(cpu=8, memory="64GB")
    _clusters.append(cluster)
    os.environ["FLUSTER_CLUSTER_ADDRESS"] = str(cluster.address)
    register()
    # Others share its workers, so that not each test has to wait for some of its own.
    _kept.append(FlusterBackend())
    _kept[0]._workers.pool(_WORKERS, _kept[0]._thread_limits())  # noqa: SLF001 - the pool that all tests of joblib's suite share
    # A program that takes longer is ended: on a busy machine to begin with the backend does.
    check = joblib.testing.check_subprocess_call

    def check_patiently(command: list[str], **more: Any) -> None:
        check(command, **{**more, "timeout": _LONGEST_S})

    joblib.testing.check_subprocess_call = check_patiently


def pytest_sessionfinish() -> None:
    _kept.clear()
    _clusters.pop().shutdown()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if "fluster" in item.name]
    gone = (LEFT_OUT.keys() | NOT_RUN.keys()) - {item.name for item in ours}
    if gone:
        raise pytest.UsageError(f"left out, and not there any more: {', '.join(sorted(gone))}")
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours[int(os.environ[HALF]) :: 2]
    for item in items:
        if item.name in LEFT_OUT:
            item.add_marker(pytest.mark.xfail(strict=True, reason=LEFT_OUT[item.name]))
        if item.name in NOT_RUN:
            item.add_marker(pytest.mark.skip(reason=NOT_RUN[item.name]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """End all with the threads' stacks if a test waits without end, as joblib's go on waiting whatever is raised in them."""
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
