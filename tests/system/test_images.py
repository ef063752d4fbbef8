"""Images, brought before what needs them starts, by a real Docker Engine and a small registry."""

import asyncio
import dataclasses
from contextlib import suppress

import pytest
from docker.errors import NotFound

from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.faults import is_workers_fault
from fluster_services.worker.engine import EngineError, find_api_version
from fluster_services.worker.engine_images import Images
from tests.docker_engine import Engine, OwnEngine
from tests.system.image_registry import running_registry
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio

PATIENCE_S = 60.0


def _images(engine: Engine, **fields: object) -> Images:
    settings = dataclasses.replace(ContainerSettings(engine=engine.host, image=engine.image), **fields)  # type: ignore[arg-type]
    return Images(settings, find_api_version(engine.host))


async def test_an_image_is_pulled_once_for_all_who_wait_for_it(engine: Engine) -> None:
    images = _images(engine)
    with running_registry() as (address, registry):
        name = f"{address}/tiny"  # without a tag it is the latest, not all that there are
        try:
            used = await asyncio.gather(*(images.use(name) for _ in range(5)))
            assert [each.exact for each in used] == [f"{name}@{registry.digest}"] * 5
            pulled = len(registry.asked)
            assert len([path for path in registry.asked if "/blobs/" in path]) == 2
            assert await images.use(name) == used[0]
            assert len(registry.asked) == pulled
        finally:
            engine.client.remove_image(name)


async def test_a_waiter_that_gives_up_does_not_end_the_pull(engine: Engine) -> None:
    images = _images(engine)
    with running_registry() as (address, registry):
        name = f"{address}/tiny:1"
        first, second = (asyncio.create_task(images.use(name)) for _ in range(2))
        await wait_until_async(lambda: registry.asked)
        first.cancel()
        try:
            assert (await second).name == name
        finally:
            engine.client.remove_image(name)


async def test_what_cannot_be_pulled_is_named_with_the_reason(engine: Engine) -> None:
    images = _images(engine)
    with running_registry() as (address, _):
        for name in (f"{address}/tiny:2", "no.such.registry.invalid/image:1"):
            with pytest.raises(
                EngineError, match=f"there is no image '{name}' here, and it cannot be pulled: the Docker engine"
            ):
                await images.use(name)


@pytest.mark.parametrize(
    ("path", "is_mute"),
    [("/v2/", True), ("/manifests/", True), ("/manifests/", False), ("/blobs/", True), ("/blobs/", False)],
)
async def test_a_registry_that_stalls_ends_the_pull_and_is_no_fault_of_the_worker(
    engine: Engine, path: str, is_mute: bool
) -> None:
    images = _images(engine, pull_timeout_s=2.0)
    with running_registry() as (address, registry):
        name = f"{address}/tiny:1"
        registry.kept_back, registry.is_mute = path, is_mute
        registry.gate.clear()
        with pytest.raises(EngineError, match=f"there is no image '{name}' here.*nothing of it came for 2 s") as raised:
            await asyncio.wait_for(images.use(name), PATIENCE_S)
        assert not is_workers_fault(raised.value)
        registry.gate.set()
        try:
            assert (await images.use(name)).exact == f"{address}/tiny@{registry.digest}"
        finally:
            engine.client.remove_image(name)


async def test_an_engine_that_stops_answering_in_the_middle_of_a_pull_is_the_workers_fault(
    own_engine: OwnEngine,
) -> None:
    images = _images(own_engine, pull_timeout_s=2.0, timeout_s=2.0)
    with running_registry() as (address, registry):
        name = f"{address}/tiny:1"
        registry.kept_back = "/blobs/"
        registry.gate.clear()
        pulling = asyncio.create_task(images.use(name))
        await wait_until_async(lambda: [path for path in registry.asked if "/blobs/" in path])
        with own_engine.silent():
            with pytest.raises(EngineError, match="did not answer in time") as raised:
                await asyncio.wait_for(pulling, PATIENCE_S)
            assert is_workers_fault(raised.value)


async def test_the_default_image_needs_no_name(engine: Engine) -> None:
    used = await _images(engine).use(None)
    assert (used.name, used.id) == (engine.image, engine.client.inspect_image(engine.image)["Id"])


async def test_an_engine_that_does_not_answer_takes_no_thread_that_others_need(own_engine: OwnEngine) -> None:
    images = _images(own_engine, timeout_s=6.0)
    with own_engine.silent():
        waiting = [asyncio.create_task(images.use(f"image:{number}")) for number in range(50)]
        waiting += [asyncio.create_task(images.use(None)) for _ in range(50)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5.0) == "free"
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(outcome) for outcome in outcomes} == {f"the Docker engine at {own_engine.host} did not answer in time"}


async def test_a_tag_that_means_another_image_by_now_is_not_taken_for_the_one_of_before(engine: Engine) -> None:
    images = _images(engine)
    with running_registry() as (address, registry):
        name = f"{address}/tiny:1"
        before = await images.use(name)
        registry.push(b"other")
        engine.client.pull(f"{address}/tiny", "1")
        try:
            after = await images.use(name)
            assert (after.name, after.is_same(before)) == (name, False)
            again = await images.use(name, earlier=before)
            assert again == before
            engine.client.remove_image(before.exact)
            assert await images.use(name, earlier=before) == before  # from the registry
            assert await images.use(name, earlier=after) == after
            assert (await images.use(before.exact)).id == before.id  # as a user may name it
            assert (await images.use(f"{name}@{before.digest}")).id == before.id
            engine.client.remove_image(before.exact)
            registry.forget(before.digest or "")
            with pytest.raises(EngineError, match=f"there is no image '{before.exact}' here, and it cannot be pulled"):
                await images.use(name, earlier=before)
        finally:
            for each in (name, before.exact):
                with suppress(NotFound):
                    engine.client.remove_image(each)
