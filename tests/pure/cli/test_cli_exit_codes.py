import pytest
from pydantic import ValidationError

from fluster import errors
from fluster.cli.common.exit_codes import EXIT_CODES_HELP, CommandError, ExitCode, report
from fluster_bus.core import errors as bus
from fluster_bus.core.names import JobId
from fluster_bus.messages import JobInfo, JobRequest, JobStatus, Namespace

_FAILED = JobInfo(job_id=JobId("a-1"), name="a", namespace=Namespace("default"), status=JobStatus.FAILED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("no", ExitCode.USAGE), 2),
        (bus.NoAddressError("no"), 3),
        (bus.AddressError("no"), 3),
        (bus.CredentialsError("no"), 3),
        (bus.NoRespondersError("no"), 3),
        (bus.RequestTimeoutError("no"), 3),
        (errors.ClusterStartError("no"), 3),
        (errors.JobNotFoundError("no"), 4),
        (errors.ActorNotFoundError("no"), 4),
        (bus.ServiceError("NamespaceNotFound", "no"), 4),
        (bus.InvalidNameError("no"), 2),
        (errors.JobFailedError(_FAILED), 1),
        (errors.ActorTimeoutError("no"), 1),
        (RuntimeError("no"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_every_error_has_its_code_and_one_line(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLUSTER_DEBUG", raising=False)
    assert report(error) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fluster: ")


def test_an_interrupt_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_value_that_a_message_refuses_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"name": "a b", "entrypoint": {"command": ["true"]}, "replicas": 0})
    assert report(caught.value) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "name='a b'" in line
    assert "replicas=0" in line


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"on_conflict": "keep"}, "on_conflict='keep' needs job_id=…: without one each launch is a job of its own"),
        ({"name": "a b"}, "name='a b': invalid job name 'a b': use 1 to 128 of the letters "),
        (
            {"entrypoint": {"command": [], "kwargs": {"password": "secret"}}},
            "entrypoint: command=[] names no program: ",
        ),
        ({"environment": {"env_vars": {"": "1", "TOKEN": "secret"}}}, "environment.env_vars: ''='1' cannot be an "),
        ({"replicas": "secret" * 100}, "replicas: it must be a valid integer"),
    ],
)
def test_what_a_whole_message_refuses_is_told_without_the_message(
    fields: dict[str, object], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate({"name": "train", "entrypoint": {"command": ["true", "secret"]}, **fields})
    assert report(caught.value) == ExitCode.USAGE
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"fluster: {line}")
    assert "secret" not in told


def test_debugging_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUSTER_DEBUG", "1")
    report(RuntimeError("no"))
    assert "RuntimeError: no" in capsys.readouterr().err.splitlines()[0]


def test_the_help_names_every_code() -> None:
    for code in ExitCode:
        assert f" {code.value} " in EXIT_CODES_HELP, code
