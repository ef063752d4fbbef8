"""What travels as JSON: frozen, strict to who makes it here, lenient to who speaks another version."""

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fluster_bus.core import codec
from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.messages import (
    Capacity,
    Endpoint,
    EndpointId,
    Entrypoint,
    EnvironmentConfig,
    JobId,
    JobInfo,
    JobRequest,
    JobStatus,
    Namespace,
    TaskRecord,
    TaskStatus,
    create_environment,
)
from fluster_bus.messages.endpoints import MAX_METADATA_BYTES
from fluster_bus.messages.jobs import MAX_ENTRYPOINT_BYTES, port_variable
from fluster_bus.messages.parts.origin import Origin
from fluster_bus.messages.parts.resources import (
    GIB,
    CpuConfig,
    GpuConfig,
    ResourceConfig,
    TpuConfig,
    parse_size,
)
from fluster_bus.messages.parts.tpu import TPU_TOPOLOGIES, tpu_topology

COMMAND = Entrypoint(command=("true",))


def _request(**fields: Any) -> JobRequest:
    return JobRequest(**{"name": "train", "entrypoint": COMMAND, **fields})


def _task(**fields: Any) -> TaskRecord:
    return TaskRecord(**{"job_id": "train-1", "namespace": "default", "task": 0, "order": 1, **fields})


# ---- every message --------------------------------------------------------------------------------------


def test_messages_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        _request().name = "other"  # type: ignore[misc]


def test_a_misspelled_field_is_refused_here() -> None:
    with pytest.raises(ValidationError, match="replica"):
        JobRequest(name="train", entrypoint=COMMAND, replica=2)  # type: ignore[call-arg]


def test_unknown_fields_of_a_newer_sender_are_kept_and_passed_on() -> None:
    sent = {
        "job_id": "train-1",
        "namespace": "default",
        "task": 0,
        "order": 1,
        "colour": "green",
        "resources": {"cpu": 2, "numa": True},
    }
    read = TaskRecord.from_json(json.dumps(sent).encode())
    changed = read.model_copy(update={"attempt": 3})
    written = json.loads(changed.to_json())
    assert written["colour"] == "green"
    assert written["resources"]["numa"] is True
    assert written["attempt"] == 3
    assert TaskRecord.from_json(changed.to_json()) == changed


def test_a_command_cannot_return() -> None:
    with pytest.raises(ValidationError, match="must_return=True is for callables"):
        _request(must_return=True)


def test_what_arrives_and_is_wrong_is_named() -> None:
    with pytest.raises(InvalidMessageError) as raised:
        JobRequest.from_json(b'{"name": "a.b", "entrypoint": {"command": ["true"]}, "replicas": 0}')
    text = str(raised.value)
    assert text.startswith("no valid JobRequest: ")
    assert "'a.b'" in text
    assert "replicas" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name": "x"}',
        b'{"name": "x", "entrypoint": {"callable": "f"}}',
        b'{"name": "x", "entrypoint": {"callable": "f", "args": 5}}',
        b'{"name": "x", "entrypoint": {"callable": "f", "kwargs": [1]}}',
        b'{"name": "x", "entrypoint": {"command": []}}',
        b'{"name": "x", "entrypoint": {"command": ["a"], "pickled": "gAQu"}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"memory": 1e999}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"memory": NaN}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"memory": -1}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"memory": "%s"}}' % (b"9" * 400),
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"cpu": Infinity}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"device": {"kind": "tpu", "variant": 4}}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "resources": {"device": {"kind": "gpu", "variant": "a.b"}}}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "job_id": "a.b"}',
        b'{"name": "x", "entrypoint": {"command": ["a"]}, "ports": ["p", "p"]}',
    ],
)
def test_whatever_arrives_the_error_is_ours(data: bytes) -> None:
    with pytest.raises(InvalidMessageError):
        JobRequest.from_json(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "name",
                        "entrypoint",
                        "command",
                        "callable",
                        "args",
                        "kwargs",
                        "resources",
                        "memory",
                        "device",
                        "kind",
                        "ports",
                        "job_id",
                    ]
                ),
                inner,
            )
        ),
    )
)
def test_no_json_breaks_the_reader(value: object) -> None:
    with suppress(InvalidMessageError):  # any other error fails the test
        JobRequest.from_json(json.dumps(value).encode())


# ---- resources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2_000_000_000),
        ("2 GB", 2_000_000_000),
        ("512MiB", 512 << 20),
        ("4g", 4 << 30),
        ("1.5k", 1536),
        ("7", 7),
        ("1Ti", 1 << 40),
        ("100b", 100),
        (12, 12),
        (12.7, 12),
        ("0", 0),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "2XB", "-1", "2 G B", "1e3", None, True, [], float("inf"), float("nan"), "9" * 400]
)
def test_what_is_no_size_is_quoted(text: object) -> None:
    with pytest.raises(ValueError, match="invalid size") as raised:
        parse_size(text)
    assert len(str(raised.value)) < 400
    assert repr(text)[:50] in str(raised.value)


@pytest.mark.parametrize(
    "resources",
    [
        ResourceConfig(),
        ResourceConfig.with_cpu(0.5, memory="2GiB", disk="1g"),
        ResourceConfig.with_gpu("H100", 8, cpu=4),
        ResourceConfig.with_gpu(),
        ResourceConfig.with_tpu("v5litepod-16"),
    ],
)
def test_resources_travel(resources: ResourceConfig) -> None:
    assert ResourceConfig.from_json(resources.to_json()) == resources
    request = _request(resources=resources)
    assert JobRequest.from_json(request.to_json()).resources == resources


def test_devices() -> None:
    assert ResourceConfig.with_cpu().device == CpuConfig()
    assert CpuConfig().chip_count() == 0
    gpu = ResourceConfig.with_gpu("H100", 8).device
    assert isinstance(gpu, GpuConfig)
    assert (gpu.variant, gpu.chip_count(), gpu.vm_count()) == ("h100", 8, 1)
    tpu = ResourceConfig.with_tpu("v5litepod-16").device
    assert isinstance(tpu, TpuConfig)
    assert (tpu.chip_count(), tpu.vm_count(), tpu.count) == (16, 4, 4)
    with pytest.raises(ValidationError, match="v5p-12288"):
        TpuConfig(variant="v5p-7")


# ---- TPU slices -----------------------------------------------------------------------------------------

SLICES = {
    "v4": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    "v5litepod": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "v5p": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 12288),
    "v6e": (1, 4, 8, 16, 32, 64, 128, 256),
}


@pytest.mark.parametrize(("generation", "number"), [(each, number) for each in SLICES for number in SLICES[each]])
def test_every_slice(generation: str, number: int) -> None:
    info = tpu_topology(f"{generation}-{number}")
    assert info.variant == f"{generation}-{number}"
    if generation in ("v4", "v5p"):
        assert info.chip_count == number // 2
        assert info.chips_per_vm == 4
        assert info.vm_count == number // 8
    else:
        assert info.chip_count == number
        single = number < 16
        assert info.vm_count == (1 if single else number // 4)
        assert info.chips_per_vm == (number if single else 4)
    assert info.chips_per_vm * info.vm_count == info.chip_count


def test_there_are_no_other_slices() -> None:
    assert set(TPU_TOPOLOGIES) == {f"{each}-{number}" for each in SLICES for number in SLICES[each]}


def test_an_unknown_slice_is_quoted_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'v6e-3'.*v6e-1, v6e-4"):
        tpu_topology("v6e-3")
    with pytest.raises(ValueError, match=r"'h100'.*v5litepod-"):
        tpu_topology("h100")


# ---- entrypoints and requests ---------------------------------------------------------------------------


def _double(number: int, *, plus: int = 0) -> int:
    return 2 * number + plus


def test_a_callable_is_pickled_at_once_with_its_arguments() -> None:
    arguments = [4]
    entrypoint = Entrypoint(callable=_double, args=(arguments,), kwargs={"plus": 1})
    arguments.append(5)
    assert entrypoint.pickled is not None
    function, args, kwargs = codec.decode(entrypoint.pickled)
    assert function is _double
    assert (args, kwargs) == (([4],), {"plus": 1})
    travelled = Entrypoint.from_json(entrypoint.to_json())
    assert travelled.pickled == entrypoint.pickled
    assert travelled.callable is None


def test_lambdas_and_closures_are_entrypoints() -> None:
    offset = 3
    entrypoint = Entrypoint(callable=lambda number: number + offset, args=(4,))
    assert entrypoint.pickled is not None
    function, args, kwargs = codec.decode(entrypoint.pickled)
    assert function(*args, **kwargs) == 7


def test_an_entrypoint_is_one_of_two() -> None:
    wrong: list[Callable[[], Entrypoint]] = [Entrypoint, lambda: Entrypoint(command=("a",), callable=_double)]
    for build in wrong:
        with pytest.raises(ValidationError, match="either callable"):
            build()
    for empty in ((), ("",)):
        with pytest.raises(ValidationError, match="names no program"):
            Entrypoint(command=empty)
    with pytest.raises(ValidationError, match="callable=8 cannot be called"):
        Entrypoint(callable=_double(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["a\udcff", "a\0"])
def test_an_argument_that_no_message_can_carry_is_refused(argument: str) -> None:
    with pytest.raises(ValidationError, match=r"invalid argument 'a.*' of command: expected UTF-8 text without NUL"):
        Entrypoint(command=("echo", argument))


def test_a_folder_that_no_message_can_name_is_seen_by_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "B\udcfcro"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    here = Origin.here(folder=folder)
    assert here.folder == f"{tmp_path}/B\\xfcro"
    assert "PATH" not in here.search
    assert not here.sees_folder()
    assert Origin.model_validate_json(here.model_dump_json()) == here


def test_what_cannot_be_pickled_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="lock"):
        Entrypoint(callable=_double, args=(threading.Lock(),))


def test_a_large_argument_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValidationError, match=r"pass a Ref .*or a path"):
        Entrypoint(callable=len, args=(b"x" * MAX_ENTRYPOINT_BYTES,))


def test_request_limits() -> None:
    for wrong in (
        {"name": "a.b"},
        {"replicas": 0},
        {"replicas": 10_001},
        {"max_retries_failure": -1},
        {"job_id": "*"},
        {"parent": "a b"},
        {"ports": ("a", "a")},
        {"ports": ("a-b", "http", "a_b")},
        {"ports": ("http", "HTTP")},
        {"ports": ("a.b",)},
    ):
        with pytest.raises(ValidationError):
            _request(**wrong)


@pytest.mark.parametrize("variables", [{"": "x"}, {"A=B": "x"}, {"A": "x\0y"}, {"A": "x\udcffy"}])
def test_environment_variables_are_checked(variables: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="environment variable"):
        EnvironmentConfig(env_vars=variables)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pip_packages": "numpy"}, "is a text: give a list"),
        ({"pip_packages": ["--index-url x"]}, "options go into `requirements`"),
        ({"pip_packages": ["a\nb"]}, "each is one package"),
        ({"pip_packages": ["a\0b"]}, "each is one package"),
        ({"pip_packages": ["a \\"]}, "each is one package"),
        ({"pip_packages": [" "]}, "each is one package"),
        ({"bundle": "../" + "a" * 61}, "bundle"),
        ({"bundle": "A" * 64}, "bundle"),
        ({"bundle": "a" * 64 + "\n"}, "bundle"),
        ({"workspace": ".", "bundle": "a" * 64}, "not both"),
        ({"uv_lock": True}, "needs workspace"),
        ({"python": "--version"}, "neither a version"),
        ({"python": ""}, "python"),
        ({"requirements": "x" * 300_000}, "requirements"),
    ],
)
def test_environments_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EnvironmentConfig(**fields)


@pytest.mark.parametrize("image", ["", " ", "a b", "-it", "x;y", "a\nb", "x" * 1_025])
def test_what_names_no_image_is_refused(image: str) -> None:
    with pytest.raises(ValidationError, match="image"):
        EnvironmentConfig(image=image)


@pytest.mark.parametrize("path", ["", "/", "data", "/data/", "/data/../etc", "//data", "/da\nta"])
def test_what_is_no_whole_path_is_not_mounted(path: str) -> None:
    for mounts in ({path: "/srv"}, {"/data": path}):
        with pytest.raises(ValidationError, match="write whole paths"):
            EnvironmentConfig(mounts=mounts)


@pytest.mark.parametrize("image", ["python:3.12-slim", "registry.example:5000/team/job@sha256:" + "0" * 64])
def test_an_image_is_named_as_for_docker(image: str) -> None:
    assert EnvironmentConfig(image=image).image == image


def test_a_callable_tells_by_which_python_it_was_pickled() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert Entrypoint(callable=len, args=("x",)).python == version
    assert COMMAND.python is None


def test_create_environment_takes_what_environments_have() -> None:
    environment = create_environment(
        workspace=".",
        pip_packages=["a", "b"],
        requirements="c",
        uv_lock=True,
        python="3.12",
        image="debian:12",
        mounts={"/data": "/srv/data"},
        env_vars={"A": "1"},
        secrets=["B"],
    )
    assert environment.model_dump(exclude={"env_vars"}) == {
        "workspace": ".",
        "bundle": None,
        "pip_packages": ("a", "b"),
        "requirements": "c",
        "image": "debian:12",
        "mounts": {"/data": "/srv/data"},
        "uv_lock": True,
        "python": "3.12",
        "secrets": ("B",),
        "cwd": None,
    }


def test_create_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "t")
    monkeypatch.setenv("WANDB_API_KEY", "w")
    monkeypatch.delenv("HF_DATASETS_TRUST_REMOTE_CODE", raising=False)
    environment = create_environment({"A": "1", "TOKENIZERS_PARALLELISM": "true"}, secrets=["HF_TOKEN"])
    assert environment.env_vars == {"A": "1", "TOKENIZERS_PARALLELISM": "true"}
    assert environment.secrets == ("HF_TOKEN",)
    with pytest.raises(ValidationError, match="give a list of the names"):
        EnvironmentConfig(secrets={"HF_TOKEN": "t"})  # type: ignore[arg-type]
    assert create_environment().env_vars["TOKENIZERS_PARALLELISM"] == "false"


# ---- the rest -------------------------------------------------------------------------------------------


def test_states_that_are_final() -> None:
    unfinished = {state for state in JobStatus if not state.finished()}
    assert unfinished == {JobStatus.PENDING, JobStatus.BUILDING, JobStatus.RUNNING}


def _info(*exit_codes: int | None) -> JobInfo:
    tasks = tuple(
        TaskStatus(task=number, status=JobStatus.FAILED, attempt=1, exit_code=code)
        for number, code in enumerate(exit_codes)
    )
    return JobInfo(job_id=JobId("j"), name="j", namespace=Namespace("default"), status=JobStatus.FAILED, tasks=tasks)


@pytest.mark.parametrize(
    ("codes", "code"), [((), None), ((0,), 0), ((0, 3, 4), 3), ((0, None), None), ((None, 2), 2), ((None,), None)]
)
def test_the_exit_code_of_a_job(codes: tuple[int | None, ...], code: int | None) -> None:
    assert _info(*codes).exit_code == code


def test_endpoints_are_checked() -> None:
    fields: dict[str, Any] = {
        "endpoint_id": EndpointId("e"),
        "name": "calc",
        "address": "x",
        "namespace": Namespace("n"),
    }
    assert Endpoint(**fields).metadata == {}
    for wrong in ({"name": "a.b"}, {"address": ""}, {"metadata": {"k": "x" * MAX_METADATA_BYTES}}):
        with pytest.raises(ValidationError):
            Endpoint(**{**fields, **wrong})


def test_capacities_are_keys() -> None:
    assert len({Capacity(cpu=1), Capacity(cpu=1.0), Capacity(cpu=2)}) == 2
    read = Capacity.from_json(Capacity(cpu=1, memory=GIB).to_json())
    assert read == Capacity(cpu=1, memory=GIB)
    assert hash(read) == hash(Capacity(cpu=1, memory=GIB))


def test_records_are_small_when_they_say_little() -> None:
    assert len(_task().to_json()) < 100


def test_ports_that_would_share_a_variable_are_named_with_it() -> None:
    with pytest.raises(ValidationError, match="'a-b' and 'A_b' would both be FLUSTER_PORT_A_B"):
        _request(ports=("http", "a-b", "A_b"))
    assert port_variable("side-car") == "FLUSTER_PORT_SIDE_CAR"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("python train.py --name 'a b'", ["python", "train.py", "--name", "a b"]),
        ("echo it's", ["echo", "it's"]),
        ("", ["python", "train.py"]),
    ],
)
def test_a_command_in_one_text_is_answered_with_its_list(command: Any, words: list[str]) -> None:
    with pytest.raises(ValidationError) as refused:
        Entrypoint(command=command)
    assert f"command={command!r}: give it as a list, such as {words!r}" in str(refused.value)
