"""Errors speak of what was given, in plain words, and no more than once."""

import re

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from fluster.actors.protocol.failures import traceback_of
from fluster.cli.app import app, main
from fluster.cli.jobs import outcome
from fluster.worker_pool.runner import TaskRunner
from fluster_bus.messages import (
    Capacity,
    Entrypoint,
    EnvironmentConfig,
    GpuConfig,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    Namespace,
    ResourceConfig,
    TaskStatus,
    TpuConfig,
)
from fluster_services import capacity


def test_a_device_is_made_by_position() -> None:
    assert GpuConfig("h100", 8) == GpuConfig(variant="h100", count=8)
    assert GpuConfig("h100", count=8) == GpuConfig("h100", 8)
    assert TpuConfig("v4-8") == TpuConfig(variant="v4-8")
    with pytest.raises(TypeError, match="takes at most variant, count by position, and 3 were given"):
        GpuConfig("h100", 8, 9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="given variant twice"):
        TpuConfig("v4-8", variant="v4-8")  # type: ignore[misc]


def test_what_is_wrong_is_said_without_pydantics_words() -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest(name="a b", entrypoint=Entrypoint(command=("x",)), resources=ResourceConfig(cpu=1))
    assert "invalid job name 'a b'" in str(caught.value)
    with pytest.raises(ValidationError) as negative:
        ResourceConfig(cpu=-1)
    assert "it must be greater than or equal to 0" in str(negative.value)
    for error in (caught.value, negative.value):
        assert not re.search(r"pydantic\.dev|Value error|Input should", str(error))


def test_a_misspelt_field_is_told_with_the_one_that_is_meant() -> None:
    """Not as the field that is missing. What a newer sender writes is kept, unknown as it is."""
    entrypoint = Entrypoint(command=("x",))
    for make, told in (
        (lambda: JobRequest(nam="a", entrypoint=entrypoint), [("nam", "unknown, did you mean 'name'?")]),  # type: ignore[call-arg]
        (
            lambda: JobRequest(nam="a", entrypoint=entrypoint, replicas=-1),  # type: ignore[call-arg]
            [
                ("nam", "unknown, did you mean 'name'?"),
                ("replicas", "it must be greater than or equal to 1"),
            ],
        ),
        (lambda: Entrypoint(comand=("x",)), [("comand", "unknown, did you mean 'command'?")]),  # type: ignore[call-arg]
        (lambda: ResourceConfig(cpus=1), [("cpus", "unknown, did you mean 'cpu'?")]),  # type: ignore[call-arg]
        (lambda: EnvironmentConfig(env_var={}), [("env_var", "unknown, did you mean 'env_vars'?")]),  # type: ignore[call-arg]
        (
            lambda: JobRequest(name="a", entrypoint=entrypoint, resources={"cpus": 1}),  # type: ignore[arg-type]
            [("resources", "ResourceConfig has no field 'cpus'; did you mean 'cpu'?")],
        ),
        (lambda: GpuConfig(colour="x"), [("colour", "unknown, GpuConfig has kind, variant, count")]),  # type: ignore[call-arg]
    ):
        with pytest.raises(ValidationError) as caught:
            make()
        assert [(str(each["loc"][0]), each["msg"]) for each in caught.value.errors()] == told
    newer = b'{"name": "a", "entrypoint": {"command": ["x"]}, "nam": "b"}'
    assert b'"nam":"b"' in JobRequest.from_json(newer).to_json()


def test_a_misfit_of_gpus_speaks_of_gpus() -> None:
    need = Capacity(cpu=1, memory=1 << 30, device="gpu", variant="h100", devices=8)
    gpus = Capacity(cpu=64, memory=1 << 36, device="gpu", variant="a100", devices=4)
    assert capacity.misfit(need, [("w1", gpus)]).endswith("; no worker has 8 x gpu h100; there is 4 x gpu a100")
    assert capacity.misfit(need, [("w1", Capacity(cpu=64))]).endswith("; no worker has 8 x gpu h100; none has any")


def test_a_misfit_of_any_gpu_names_no_model() -> None:
    need = Capacity(cpu=1, memory=1 << 30, device="gpu", variant="any", devices=2)
    text = capacity.misfit(need, [("w1", Capacity(cpu=64))])
    assert text == "needs 1 CPU, 1 GiB memory, 2 x gpu; no worker has 2 x gpu; none has any"


def test_a_secret_that_is_not_set_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FLUSTER_NOT_SET", raising=False)
    monkeypatch.setattr("sys.argv", ["fluster", "submit", "--secret", "FLUSTER_NOT_SET", "--", "true"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "fluster: --secret: FLUSTER_NOT_SET not set" in capsys.readouterr().err


def test_what_never_ran_has_written_nothing() -> None:
    info = JobInfo(
        job_id=JobId("a-1"),
        namespace=Namespace("default"),
        name="a",
        status=JobStatus.UNSCHEDULABLE,
        error_message="needs 8 CPUs",
    )
    assert outcome(info) == "job a-1 ended as UNSCHEDULABLE: needs 8 CPUs"
    building = TaskStatus(task=0, status=JobStatus.FAILED, attempt=1, started_at=1.0)
    claimed = info.model_copy(update={"started_at": 1.0, "tasks": (building,)})
    assert outcome(claimed) == outcome(info), "its worker claimed it, and started no process"
    ran = info.model_copy(update={"tasks": (building.model_copy(update={"has_output": True}),)})
    assert "`fluster logs a-1`" in outcome(ran)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["up", "--cpu", "0"], "cpu=0.0: give a number of CPUs above 0"),
        (["submit", "--gpu", "-1", "--", "x"], "--gpu='-1': expected a model, a count or both"),
    ],
)
def test_numbers_that_make_no_sense_are_wrong_usage(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, why in done.stderr) == (2, True), done.stderr


def test_flags_are_shown_without_a_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fluster", "submit", "--help"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().out
    assert "--gang" in shown
    assert "bool" not in shown


def test_a_remote_traceback_begins_with_the_users_code() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        TaskRunner(lambda _: None)._call(fails, (), {}, None)  # noqa: SLF001 - the frame that is left out of a traceback is its own
    text = traceback_of(caught.value, skipped_frames=1)
    assert "runner.py" not in text
    assert "in fails" in text
