"""What fray asks for, in Fluster's words."""

from typing import Any

import pytest

from tests.optional import import_or_skip

import_or_skip("zephyr", "`make setup-zephyr` installs it")

from fray import types as fray
from rigging.timing import Duration

from fluster.integrations.fray import requests
from fluster_bus.core.names import MAX_NAME_LENGTH, check_name
from fluster_bus.messages import EnvironmentConfig, GpuConfig, TpuConfig

NONE = EnvironmentConfig()

since_0_2_227 = pytest.mark.skipif(not hasattr(fray, "ANY_REGION"), reason="fray 0.2.20 cannot ask for it")


def _noop(*_args: object) -> None: ...


def _request(**options: Any) -> fray.JobRequest:
    return fray.JobRequest(**{"name": "train", "entrypoint": fray.Entrypoint.from_callable(_noop), **options})


def test_names_are_kept_where_fluster_can_have_them() -> None:
    assert requests.name_of("zephyr--1a2b-workers") == "zephyr--1a2b-workers"


@pytest.mark.parametrize("name", ["a.b", "a/b", "grüße", "x" * (MAX_NAME_LENGTH + 1), ""])
def test_other_names_are_made_fit(name: str) -> None:
    assert check_name("job", requests.name_of(name))


def test_names_that_differ_stay_different() -> None:
    names = ["a.b", "a/b", "a-b", "x" * 200, "x" * 201]
    assert len({requests.name_of(name) for name in names}) == len(names)


def test_two_jobs_may_have_jobs_of_one_name() -> None:
    assert len({requests.name_of("eval"), requests.name_of("eval", "a"), requests.name_of("eval", "b")}) == 3


def test_a_job_asks_for_the_same() -> None:
    job = requests.job_of(
        _request(
            resources=fray.ResourceConfig(
                cpu=2.5, ram="4g", disk="10g", zone="z1", regions=["r1"], image="python:3.12"
            ),
            environment=fray.EnvironmentConfig(workspace="/work", env_vars={"A": "1"}, pip_packages=["rich"]),
            replicas=3,
            max_retries_failure=2,
            max_retries_preemption=7,
            priority=3,
        ),
        _noop,
        NONE,
    )
    assert (job.resources.cpu, job.resources.memory, job.resources.disk) == (2.5, 4 << 30, 10 << 30)
    assert job.resources.labels == {"zone": "z1", "region": "r1"}
    assert (job.environment.image, job.environment.workspace) == ("python:3.12", "/work")
    assert job.environment.pip_packages == ("rich",)
    assert job.environment.env_vars == {"JAX_PLATFORMS": "cpu", "A": "1"}
    assert (job.replicas, job.gang, job.timeout_s) == (3, False, None)
    assert (job.max_retries_failure, job.max_retries_preemption, job.max_task_failures) == (2, 7, 0)
    assert job.priority < requests.job_of(_request(), _noop, NONE).priority


@since_0_2_227
def test_limits_are_kept() -> None:
    job = requests.job_of(_request(max_task_failures=1, timeout=Duration.from_seconds(90)), _noop, NONE)
    assert (job.max_task_failures, job.timeout_s) == (1, 90)


def test_who_names_no_environment_has_the_default() -> None:
    default = EnvironmentConfig(bundle="0" * 64, env_vars={"A": "1"}, image="debian")
    found = requests.environment_of(None, fray.ResourceConfig(image="python:3.12"), default)
    assert (found.bundle, found.image) == (default.bundle, "python:3.12")
    assert found.env_vars == {"JAX_PLATFORMS": "cpu", "A": "1"}
    assert requests.environment_of(None, fray.ResourceConfig(), default).image == "debian"
    own = fray.EnvironmentConfig(docker_image="alpine")
    assert requests.environment_of(own, fray.ResourceConfig(), default).env_vars == {"JAX_PLATFORMS": "cpu"}


def test_a_command_is_one() -> None:
    job = requests.job_of(_request(entrypoint=fray.Entrypoint.from_binary("echo", ["a", "b"])), _noop, NONE)
    assert job.entrypoint.command == ("echo", "a", "b")


def test_what_asks_for_nothing_asks_for_nothing() -> None:
    found = requests.resources_of(fray.ResourceConfig(preemptible=False, regions=["*"]))
    assert (found.disk, found.labels) == (0, {})


def test_gpus_of_several_machines_start_together() -> None:
    gpus = fray.ResourceConfig.with_gpu("H100", count=8)
    job = requests.job_of(_request(resources=gpus, replicas=2), _noop, NONE)
    assert job.gang
    assert job.resources.device == GpuConfig(variant="h100", count=8)
    assert not requests.is_slice(gpus, 2)  # actors of one group are each on its own
    assert requests.resources_of(fray.ResourceConfig.with_gpu("auto")).device == GpuConfig(variant="any")


def test_the_machines_of_a_slice_start_together() -> None:
    tpu = fray.ResourceConfig.with_tpu("v5litepod-16")
    job = requests.job_of(_request(resources=tpu), _noop, NONE)
    assert (job.gang, job.replicas) == (True, 4)
    assert job.resources.device == TpuConfig(variant="v5litepod-16")
    assert "LIBTPU_INIT_ARGS" in job.environment.env_vars


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param("target_cluster", "elsewhere", marks=since_0_2_227),
        ("device_alternatives", ["v4-8"]),
        pytest.param("container_profile", "CONTAINER_PROFILE_PRIVILEGED", marks=since_0_2_227),
        ("regions", ["r1", "r2"]),
    ],
)
def test_resources_that_there_are_not_are_named(option: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=option):
        requests.resources_of(fray.ResourceConfig(**{option: value}))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        pytest.param("secrets", {"A": "b"}, marks=since_0_2_227),
        ("extras", ["tpu"]),
        pytest.param("setup_scripts", ["true"], marks=since_0_2_227),
        pytest.param("sync_packages", ["fray"], marks=since_0_2_227),
    ],
)
def test_environments_that_there_are_not_are_named(option: str, value: object) -> None:
    with pytest.raises(NotImplementedError, match=option) as raised:
        requests.environment_of(fray.EnvironmentConfig(workspace="/w", **{option: value}), fray.ResourceConfig(), NONE)
    assert "Fluster does not have that" in str(raised.value)


@since_0_2_227
def test_secrets_are_not_shown() -> None:
    environment = fray.EnvironmentConfig(workspace="/w", secrets={"TOKEN": "hunter2"})
    with pytest.raises(NotImplementedError) as raised:
        requests.environment_of(environment, fray.ResourceConfig(), NONE)
    assert "hunter2" not in str(raised.value)


@since_0_2_227
def test_several_processes_a_task_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="processes_per_task=2"):
        requests.job_of(_request(processes_per_task=2), _noop, NONE)


def test_a_band_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="priority=7"):
        requests.priority_of(7)
