"""Which image a job's packages are put into, what it is made from, and which go: decided without an engine."""

import dataclasses
import io
import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluster_bus.messages import EnvironmentConfig
from fluster_services.worker.contract.faults import BuildOutput
from fluster_services.worker.engine import EngineError
from fluster_services.worker.environments.build_request import write_context
from fluster_services.worker.environments.environment_images import _add, _reason
from fluster_services.worker.environments.environments import Needs, read_needs
from fluster_services.worker.environments.image_recipe import (
    BuiltImage,
    ImageRecipe,
    build_variables,
    is_leftover,
    least_recently_used,
)

BASE = "sha256:" + "a" * 64
PACKAGES = st.lists(st.from_regex(r"\A[a-z]{1,8}(>=[0-9]{1,2})?\Z"), max_size=6)


def recipe(**fields: object) -> ImageRecipe:
    config = EnvironmentConfig(**fields)  # type: ignore[arg-type]
    return ImageRecipe(BASE, read_needs(config, None))


@settings(max_examples=50)
@given(PACKAGES, st.randoms())
def test_the_same_packages_are_the_same_image_in_whatever_order(packages: list[str], random: object) -> None:
    shuffled = [*packages, *packages[:1]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = recipe(pip_packages=packages), recipe(pip_packages=[f" {each} " for each in shuffled])
    assert one == other
    assert one.dockerfile("3.12") == other.dockerfile("3.12")
    assert one.tag() == other.tag()


@settings(max_examples=50)
@given(PACKAGES, PACKAGES)
def test_other_packages_are_another_image(some: list[str], others: list[str]) -> None:
    assert (recipe(pip_packages=some).key() == recipe(pip_packages=others).key()) == (set(some) == set(others))


def test_every_part_makes_another_image() -> None:
    one = ImageRecipe(BASE, Needs(None, "a", None, None))
    others = [dataclasses.replace(one.needs, **{name: "x"}) for name in ("python", "requirements", "lock", "workspace")]
    keys = {
        each.key() for each in [one, ImageRecipe("sha256:b", one.needs), *(ImageRecipe(BASE, each) for each in others)]
    }
    assert len(keys) == 6


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=30), st.text(min_size=1, max_size=30))
def test_nothing_that_a_job_says_is_in_the_dockerfile(requirements: str, python: str) -> None:
    key = "KEY"
    plain = ImageRecipe(BASE, Needs(None, "", None, None))
    hostile = ImageRecipe(BASE, Needs(python, requirements, None, None))
    assert hostile.dockerfile("3.12").replace(hostile.key(), key) == plain.dockerfile("3.12").replace(plain.key(), key)


def test_the_dockerfile() -> None:
    made = recipe(pip_packages=["rich"])
    assert (
        made.dockerfile("3.12")
        == f"""\
# What is built here is thrown away: only the environment goes into the image.
FROM {BASE} AS packages
ARG FLUSTER_BUILDER
LABEL fluster.builder="$FLUSTER_BUILDER"
COPY --chown=65534:65534 environment /opt/fluster-environment
COPY --chown=65534:65534 build /opt/fluster-build
USER 65534:65534
RUN ["python3", "-I", "/opt/fluster-build/image_install.py"]

FROM {BASE}
LABEL fluster.environment="{made.key()}" fluster.python="3.12"
COPY --from=packages --chown=0:0 /opt/fluster-environment /opt/fluster-environment
ENV VIRTUAL_ENV=/opt/fluster-environment PATH=/opt/fluster-environment/bin:$PATH
"""
    )


def test_builds_are_told_where_packages_are_and_nothing_of_the_machine() -> None:
    passed = {
        "PIP_INDEX_URL": "https://user:secret@index.example/simple",
        "PIP_NO_INDEX": "1",
        "UV_INDEX_MINE_PASSWORD": "secret",
        "https_proxy": "http://proxy.example:3128",
    }
    own = {
        "PIP_CERT": "/etc/own.pem",
        "PIP_TARGET": "/usr",
        "UV_CACHE_DIR": "/cache",
        "FLUSTER_CREDENTIALS": "/secret",
        "PATH": "/bin",
        "PIP_CONFIG_FILE": "/etc/pip.conf",
        "UV_FIND_LINKS": "/wheels",
    }
    mixed = {"PIP_FIND_LINKS": "/wheels file:///wheels https://links.example/"}
    assert build_variables({**passed, **own, **mixed}) == {**passed, "PIP_FIND_LINKS": "https://links.example/"}


def _context(made: ImageRecipe, workspace: Path | None = None) -> dict[str, bytes | None]:
    file = io.BytesIO()
    write_context(
        file,
        made,
        "FROM x",
        workspace=workspace,
        variables={"PIP_NO_INDEX": "1"},
        authorities="CA",
        uv=Path("/bin/true"),
    )
    with tarfile.open(fileobj=file) as archive:
        found = {}
        for entry in archive:
            content = archive.extractfile(entry)
            found[entry.name] = None if content is None else content.read()
            assert (entry.uid, entry.gid, entry.mtime, entry.mode & 0o022) == (0, 0, 0, 0)
    return found


def test_what_a_build_is_made_from(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "uv.lock", "secret.txt"):
        (tmp_path / name).write_text(name)
    plain = _context(ImageRecipe(BASE, Needs("3.12", "rich", None, None)), tmp_path)
    assert plain["build/workspace/fluster-requirements.txt"] == b"rich\n"
    assert json.loads(plain["build/recipe.json"] or b"") == {
        "python": "3.12",
        "has_lock": False,
        "has_requirements": True,
    }
    assert (plain["Dockerfile"], plain["build/ca.pem"]) == (b"FROM x", b"CA")
    assert not {"build/uv", "build/workspace/secret.txt", "build/workspace/uv.lock"} & set(plain)
    locked = _context(ImageRecipe(BASE, Needs(None, "", "1" * 64, None)), tmp_path)
    assert {"build/uv", "build/workspace/uv.lock", "build/workspace/pyproject.toml"} <= set(locked)
    assert not {"build/workspace/secret.txt", "build/workspace/fluster-requirements.txt"} & set(locked)
    whole = _context(ImageRecipe(BASE, Needs(None, "./a.whl", None, "0" * 64)), tmp_path)
    assert "build/workspace/secret.txt" in whole


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 100)), max_size=20), st.sets(st.integers(0, 20)))
def test_the_least_recently_used_go_first_and_never_one_in_use_or_fresh(
    uses: list[tuple[int, float]], used: set[int]
) -> None:
    images = [BuiltImage(str(number), used_at) for number, used_at in dict(uses).items()]
    going = least_recently_used(images, spared=map(str, used), used_before=50.0)
    at = {image.tag: image.used_at for image in images}
    assert [at[tag] for tag in going] == sorted(at[tag] for tag in going)
    assert set(going) == {tag for tag, used_at in at.items() if used_at < 50.0 and int(tag) not in used}


@pytest.mark.parametrize(
    ("builder", "age_s", "goes"),
    [
        ("/mine#1", 1.0, False),  # goes on
        ("/mine#2", 0.0, True),
        ("/theirs#1", 99.0, False),
        ("/theirs#1", 101.0, True),
        ("/mine/other#1", 1.0, False),
        ("", 1.0, False),
    ],
)
def test_what_is_left_of_builds_that_are_over(builder: str, age_s: float, goes: bool) -> None:
    assert is_leftover(builder, state="/mine", building={"/mine#1"}, age_s=age_s, others_s=100.0) is goes


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("write /var/lib/docker/x: no space left on device", "Step 5"),
        (
            "returned a non-zero code: 1",
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        ),
        ("returned a non-zero code: 1", "OSError: [Errno 122] Disk quota exceeded"),
    ],
)
def test_a_full_disk_is_told_as_such(error: str, line: str) -> None:
    output = BuildOutput()
    output.add(line)
    assert _reason(EngineError(error), output).startswith("the disk of the Docker engine is full: make room there")
    assert (
        _reason(EngineError("returned 1"), BuildOutput()) == "the image for its packages could not be built: returned 1"
    )


def test_the_last_words_are_those_of_the_last_step() -> None:
    output = BuildOutput()
    for line in (
        "Step 1/2 : FROM x",
        " ---> 1234",
        "of the first",
        "Step 2/2 : RUN pip",
        "\x1b[0mRemoving intermediate container 1",
        "pip",
    ):
        _add(output, line)
    assert output.last_words() == "pip"
    assert [text for _time, text in output.lines] == [
        "$ Step 1/2 : FROM x",
        "of the first",
        "$ Step 2/2 : RUN pip",
        "pip",
    ]
