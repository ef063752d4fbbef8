"""The fixture `fluster_cluster`, in test runs of their own, where pytest finds the plugin by itself."""

from __future__ import annotations

import pytest

from tests.system.processes import Family

pytest_plugins = ["pytester"]

_TESTS = """
    from fluster import LocalCluster, WorkerPool

    seen = []

    def square(number):
        return number * number

    def test_functions_run_on_it(fluster_cluster):
        seen.append(fluster_cluster)
        with WorkerPool(fluster_cluster, 2) as pool:
            assert pool.map(square, range(5)).results() == [0, 1, 4, 9, 16]

    def test_all_tests_share_it(fluster_cluster):
        assert seen == [fluster_cluster]
        workers = fluster_cluster.list_workers()
        assert (len(workers), sum(worker.info.total.cpu for worker in workers)) == {shape}
"""


@pytest.fixture
def run(pytester: pytest.Pytester, family: Family) -> pytest.Pytester:
    return pytester


@pytest.mark.parametrize(
    ("arguments", "settings", "shape"),
    [
        (["--fluster-workers=3", "--fluster-cpu=6"], {"fluster_workers": "1"}, (3, 6)),
        ([], {"fluster_workers": "1", "fluster_cpu": "5"}, (1, 5)),
    ],
    ids=["as the command line says", "as the settings say"],
)
def test_a_cluster_for_all_tests(
    run: pytest.Pytester,
    family: Family,
    arguments: list[str],
    settings: dict[str, str],
    shape: tuple[int, int],
) -> None:
    run.makepyfile(_TESTS.replace("{shape}", repr(shape)))
    run.makeini("\n".join(["[pytest]", *(f"{name} = {value}" for name, value in settings.items())]))
    done = run.runpytest_subprocess("-W", "error", *arguments)
    done.assert_outcomes(passed=2)
    family.wait_gone()


def test_what_cannot_be_is_told(run: pytest.Pytester) -> None:
    run.makepyfile("def test_nothing(fluster_cluster): ...")
    for asked, told in (
        (("--fluster-workers=0",), "*workers=0: give the number of workers*"),
        (("-o", "fluster_cpu=many"), "*fluster_cpu = many: give a number*"),
    ):
        done = run.runpytest_subprocess(*asked)
        done.assert_outcomes(errors=1)
        done.stdout.fnmatch_lines([told])


def test_it_is_told_of_and_nothing_is_started_for_who_does_not_ask(run: pytest.Pytester) -> None:
    run.makepyfile(
        """
        import sys

        def test_nothing():
            assert "fluster.cluster" not in sys.modules
        """
    )
    run.runpytest_subprocess("-W", "error").assert_outcomes(passed=1)
    run.runpytest_subprocess("--help").stdout.fnmatch_lines(["*--fluster-workers=N*", "*fluster_workers (string)*"])
