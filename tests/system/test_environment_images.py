"""Images with the packages of jobs, built by a real Docker Engine. Packages come from the workspace, or an index on this machine."""

import asyncio
import dataclasses
import hashlib
import json
import subprocess
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.container import OWN_MINOR
from fluster_services.worker.contract.faults import BuildError, BuildOutput
from fluster_services.worker.engine import EngineError, find_api_version
from fluster_services.worker.environments import environment_images
from fluster_services.worker.environments.environment_images import EnvironmentImages
from fluster_services.worker.environments.environments import Needs
from fluster_services.worker.environments.image_recipe import KEY_LABEL
from tests.docker_engine import Engine, OwnEngine
from tests.system.built_images import left_of_builds, no_built_images
from tests.system.package_index import PackageIndex
from tests.system.wheels import make_wheel
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def _builds_know_the_index(index: PackageIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url)


@pytest.fixture(autouse=True)
def _nothing_stays(engine: Engine) -> Iterator[None]:
    with no_built_images(engine):
        yield


@asynccontextmanager
async def running_images(engine: Engine, name: str = "one", **fields: Any) -> AsyncIterator[EnvironmentImages]:
    """Those of one worker."""
    settings = dataclasses.replace(ContainerSettings(engine=engine.host, image=engine.image), **fields)
    images = EnvironmentImages(settings, find_api_version(engine.host), f"/{name}")
    try:
        yield images
    finally:
        await images.close()


@pytest.fixture
def small_engine(own_engine: OwnEngine, tmp_path: Path) -> Iterator[OwnEngine]:
    """An engine with room for the image of the tests, and little more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=420m", "tmpfs", disk], check=True)
    folder = Path(tempfile.mkdtemp(prefix="fluster-engine-"))  # short, for its socket
    try:
        small = OwnEngine(folder, disk / "data")
        yield small
        small.remove()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def needs(*requirements: str, **fields: Any) -> Needs:
    return Needs(**{"python": None, "requirements": "\n".join(requirements), "lock": None, "workspace": None, **fields})


def nobody_listens(_output: BuildOutput) -> None:
    """The output of a build does not matter here."""


def said(outputs: list[BuildOutput]) -> list[str]:
    return [text for output in outputs for _time, text in output.lines]


def run(engine: Engine, image: str, program: str) -> str:
    """What a program says that is run in an image by its Python."""
    made = engine.client.create_container(image, ["python3", "-c", program], user="65534")["Id"]
    try:
        engine.client.start(made)
        engine.client.wait(made)
        return str(engine.client.logs(made).decode())
    finally:
        engine.client.remove_container(made, force=True)


async def test_an_image_has_the_packages_and_nothing_of_how_they_came(
    engine: Engine, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(tmp_path / "workspace" / "wheels", "beside")
    index.may_answer.set()
    authorities = tmp_path / "ca.pem"
    authorities.write_text("")
    wanted = needs("indexed", "./wheels/beside-1.0-py3-none-any.whl", workspace="0" * 64)
    outputs: list[BuildOutput] = []
    async with running_images(engine, build_authorities=str(authorities)) as images:
        tag = await images.use(engine.image, wanted, tmp_path / "workspace", "ns.job.0.1", outputs.append)
        assert await images.use(engine.image, wanted, tmp_path / "workspace", "ns.other.0.1", outputs.append) == tag
        async with running_images(engine, "two") as others:
            assert await others.use(engine.image, wanted, tmp_path / "workspace", "ns.third.0.1", outputs.append) == tag
        await wait_until_async(lambda: not left_of_builds(engine), PATIENCE_S)
    assert len(outputs) == 1
    assert any("Successfully installed beside-1.0 indexed-1.0" in line for line in said(outputs))
    program = "import beside, indexed, os, shutil; print(beside.VERSION, indexed.where(), os.path.exists('/opt/fluster-build'))"
    assert run(engine, tag, program) == (
        f"1.0 /opt/fluster-environment/lib/python{OWN_MINOR}/site-packages/indexed.py False\n"
    )
    kept = json.dumps([engine.client.inspect_image(tag), engine.client.history(tag)])
    assert "secret" not in kept
    assert "/one" not in kept


async def test_all_who_ask_at_once_also_of_two_workers_wait_for_one_build(engine: Engine, index: PackageIndex) -> None:
    outputs: list[BuildOutput] = []
    async with running_images(engine) as one, running_images(engine, "two") as two:
        users = [(images, f"ns.{job}.{task}.1") for images in (one, two) for job in ("a", "b") for task in range(2)]
        asking = [
            asyncio.create_task(images.use(engine.image, needs("indexed"), None, user, outputs.append))
            for images, user in users
        ]
        await wait_until_async(index.asked.is_set, PATIENCE_S)
        await wait_until_async(lambda: "$ wait for a build of the same image here" in said(outputs), PATIENCE_S)
        assert not any(each.done() for each in asking)
        index.may_answer.set()
        assert len(set(await asyncio.gather(*asking))) == 1
    assert len(outputs) == 4, "each job hears it once from each worker"
    assert sum(line.startswith("Successfully built") for line in said(list(dict.fromkeys(outputs)))) == 1


async def test_a_build_ends_with_those_who_want_it_and_with_its_worker(engine: Engine, index: PackageIndex) -> None:
    async with running_images(engine) as images:
        asking = [
            asyncio.create_task(images.use(engine.image, needs("indexed"), None, f"ns.job.{n}.1", nobody_listens))
            for n in range(2)
        ]
        await wait_until_async(index.asked.is_set, PATIENCE_S)
        asking[0].cancel()
        await asyncio.wait({asking[0]})
        assert not asking[1].done(), "the other one still wants it"
        asking[1].cancel()
        await asyncio.wait({asking[1]})
        index.asked.clear()
        again = asyncio.create_task(images.use(engine.image, needs("indexed"), None, "ns.job.2.1", nobody_listens))
        await wait_until_async(index.asked.is_set, PATIENCE_S)
    assert again.done(), "its worker left"
    await wait_until_async(lambda: not left_of_builds(engine), PATIENCE_S)


async def test_a_build_that_takes_too_long_is_told_as_such(engine: Engine, index: PackageIndex) -> None:
    async with running_images(engine, build_timeout_s=8.0) as images:
        with pytest.raises(BuildError, match=r"was not built within 8 s; the last words:\n"):
            await images.use(engine.image, needs("indexed"), None, "ns.job.0.1", nobody_listens)
        await wait_until_async(lambda: not left_of_builds(engine), PATIENCE_S)


async def test_an_engine_that_stops_answering_or_ends_in_the_middle_is_told(
    own_engine: OwnEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_images, "_WATCH_S", 0.2)
    async with running_images(own_engine, timeout_s=15.0) as images:

        async def begin() -> asyncio.Task[str]:
            outputs: list[BuildOutput] = []
            use = images.use(own_engine.image, needs("indexed"), None, "ns.job.0.1", outputs.append)
            asking = asyncio.create_task(use)
            await wait_until_async(
                lambda: asking.done() or any("pip install" in line for line in said(outputs)), PATIENCE_S
            )
            return asking

        asking = await begin()
        with own_engine.silent(), pytest.raises(BuildError, match=r"did not answer in time; the last words:\n"):
            await asking
        asking = await begin()
        own_engine.stop()
        try:
            # Its socket may be gone before its answer ends, and then that is seen first.
            with pytest.raises(BuildError, match=r"went away while it built|cannot be reached: No such file"):
                await asking
        finally:
            own_engine.start()
        await wait_until_async(lambda: not left_of_builds(own_engine), PATIENCE_S)


async def test_a_full_disk_of_the_engine_is_told_as_such_and_left_as_it_was(
    tmp_path: Path, small_engine: OwnEngine
) -> None:
    wheel = make_wheel(tmp_path / "workspace", "large")
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large.bin", bytes(300 << 20))
    wanted = needs("./large-1.0-py3-none-any.whl", workspace="0" * 64)
    async with running_images(small_engine) as images:
        with pytest.raises(BuildError, match=r"(?s)the disk of the Docker engine is full: make room.*No space left"):
            await images.use(small_engine.image, wanted, tmp_path / "workspace", "ns.job.0.1", nobody_listens)
    assert left_of_builds(small_engine) == []


@pytest.mark.parametrize(
    ("image", "python", "reason"),
    [
        ("bare_image", None, "has no python3 to install packages for"),
        ("image", "3.99", "has no Python '3.99' to install packages for: name another image"),
        ("image", "a\nb; touch /tmp/x '\"$(id)`id`", "to install packages for"),
    ],
)
async def test_an_image_without_the_python_that_is_asked_for(
    engine: Engine, image: str, python: str | None, reason: str
) -> None:
    async with running_images(engine) as images:
        with pytest.raises(EngineError, match=reason):
            await images.find_python(getattr(engine, image), python)


LOCK = """
version = 1
requires-python = ">=3.11"

[[package]]
name = "locked"
version = "4.2"
source = { path = "wheels/locked-4.2-py3-none-any.whl" }
wheels = [{ filename = "locked-4.2-py3-none-any.whl", hash = "sha256:SHA256" }]

[[package]]
name = "user-project"
version = "1"
source = { virtual = "." }
dependencies = [{ name = "locked" }]

[package.metadata]
requires-dist = [{ name = "locked", path = "wheels/locked-4.2-py3-none-any.whl" }]
"""


async def test_a_lock_and_packages_for_the_python_that_is_named(engine: Engine, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheels", "locked", "4.2")
    make_wheel(tmp_path / "wheels", "beside")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "user-project"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["locked"]\n'
        '[tool.uv.sources]\nlocked = {path = "wheels/locked-4.2-py3-none-any.whl"}\n'
    )
    (tmp_path / "uv.lock").write_text(LOCK.replace("SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest()))
    beside = "./wheels/beside-1.0-py3-none-any.whl"
    wanted = needs(beside, lock="1" * 64, workspace="0" * 64, python="/usr/bin/python3")
    async with running_images(engine) as images:
        version = await images.find_python(engine.image, wanted.python)
        tag = await images.use(engine.image, wanted, tmp_path, "ns.job.0.1", nobody_listens)
    program = "import beside, locked, sys; print(beside.VERSION, locked.VERSION, '%d.%d' % sys.version_info[:2])"
    assert run(engine, tag, program) == f"1.0 4.2 {version}\n"


async def test_nothing_is_built_upon_what_was_built(engine: Engine) -> None:
    async with running_images(engine) as images:
        with pytest.raises(EngineError, match="'fluster-environment:one' was built for packages itself"):
            await images.use(_fake(engine, "one"), needs("indexed"), None, "ns.job.0.1", nobody_listens)


# ---- what goes ------------------------------------------------------------------------------------------


def _fake(engine: Engine, key: str, after: Callable[[], object] = lambda: None) -> str:
    """An image that looks as if it had been built for jobs."""
    made = engine.client.create_container(engine.image, "true")["Id"]
    engine.client.commit(made, "fluster-environment", key, changes=[f"LABEL {KEY_LABEL}={key}"])
    engine.client.remove_container(made)
    after()
    return f"fluster-environment:{key}"


async def test_the_least_recently_used_go_but_none_that_is_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_images, "_FRESH_S", 0.0)
    theirs = f"{engine.image}-theirs"
    engine.client.tag(engine.image, *theirs.split(":"))
    tags = [_fake(engine, f"{number}") for number in range(5)]
    container = engine.client.create_container(tags[0], "true")["Id"]
    async with running_images(engine, max_images=2) as images:
        images._used["ns.job.0.1"] = tags[1]  # noqa: SLF001 - as if a task ran in it
        assert images.store.use(tags[2]) == "", "counts as used now"
        await images.evict()
        assert sorted(image.tag for image in images.store.built()) == tags[:2]
        engine.client.remove_container(container)
        images.release("ns.job.0.1")
        await images.evict()
        assert len(images.store.built()) == 2
    assert engine.client.inspect_image(theirs), "nobody asked Fluster to keep less of these"
    engine.client.remove_image(theirs)


async def test_an_image_that_was_just_used_stays_since_another_worker_may_start_in_it(engine: Engine) -> None:
    tag = _fake(engine, "new")
    async with running_images(engine, max_images=0) as images:
        await images.evict()
        assert [image.tag for image in images.store.built()] == [tag]
