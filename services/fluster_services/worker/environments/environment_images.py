"""The images that are built for jobs who ask for packages: each once for all who wait for it, kept while there is room."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.faults import MAX_LINE_BYTES, BuildError, BuildOutput, without_codes
from fluster_services.worker.contract.spool import LineCutter
from fluster_services.worker.engine import EngineError, asked
from fluster_services.worker.environments.build_request import build_image, write_context
from fluster_services.worker.environments.environments import Listener, Needs
from fluster_services.worker.environments.folder_cache import in_thread
from fluster_services.worker.environments.image_recipe import (
    BUILDER_ARGUMENT,
    ImageRecipe,
    build_variables,
    is_leftover,
    least_recently_used,
)
from fluster_services.worker.environments.image_store import ImageStore
from fluster_services.worker.environments.uv import find_uv
from fluster_services.worker.linux.process_locks import alone

_log = logging.getLogger(__name__)

_FRESH_S = 600.0  # after its last use, in which an image stays in any case
_OTHERS_S = 86_400.0  # what another worker's build has left is removed when it is that old
# Pauses before looks at what may go after a build: an engine needs a while to give one up, and images do not stay fresh.
_SWEEPS_S = (0.0, 1.0, 5.0, 30.0, _FRESH_S)
_LEAVING_S, _LOOK_S = 5.0, 0.2
_WATCH_S = 15.0  # between two looks whether an engine that builds still answers
_STEP = re.compile(r"Step \d+/\d+ : ")
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


@dataclass(eq=False)
class _Build:
    tag: str
    output: BuildOutput = field(default_factory=BuildOutput)
    users: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)  # that hear what is said
    task: asyncio.Task[None] | None = None


class EnvironmentImages:
    """Those of one worker, at an engine that it may share with others. `state` tells its builds from theirs."""

    def __init__(self, settings: ContainerSettings, api_version: str, state: str) -> None:
        self._settings = settings
        self.store = ImageStore(settings, api_version)
        self._api_version = api_version
        self._state = state
        self._builds: dict[str, _Build] = {}  # {tag: what builds it}
        self._used: dict[str, str] = {}  # {user: tag}
        self._pythons: dict[tuple[str, str | None], str] = {}  # {(image, name): version}
        self._builders: set[str] = set()  # the labels of what is there for builds that go on
        self._tasks: set[asyncio.Task[None]] = set()  # all that build, also those that are being given up
        self._sweeping: asyncio.Task[None] | None = None
        self._is_untidy = False  # something may be left of builds
        self._is_closing = False

    async def find_python(self, base: str, name: str | None) -> str:
        """The version of the Python that `name` means in an image that is there. Raises EngineError."""
        image = await asked(self.store.base_id, base)
        known = self._pythons.get((image, name))
        if known is None:
            builder = self._new_builder()
            try:
                known = await asked(self.store.find_python, base, name, builder)
            finally:
                self._builders.discard(builder)
            self._pythons[image, name] = known
        return known

    async def use(self, base: str, needs: Needs, workspace: Path | None, user: str, listen: Listener) -> str:
        """The name of an image with what `needs` says upon `base`, built unless it is there; it stays until `user` releases it.

        `listen` gets what is said meanwhile, of one user of each job. Raises BuildError with the last words, EngineError.
        """
        recipe = ImageRecipe(await asked(self.store.base_id, base), needs)
        tag = recipe.tag()
        self._used[user] = tag
        try:
            build = self._builds.get(tag)
            if build is None:
                if await asked(self.store.use, tag) is not None:
                    return tag
                # Another attempt may have begun meanwhile.
                build = self._builds.get(tag) or self._begin(recipe, base, workspace)
            await self._wait(build, user, listen)
        except BaseException:
            del self._used[user]
            raise
        return tag

    def _begin(self, recipe: ImageRecipe, base: str, workspace: Path | None) -> _Build:
        build = self._builds[recipe.tag()] = _Build(recipe.tag())
        build.task = asyncio.create_task(self._make(build, recipe, base, workspace), name=f"build of {build.tag}")
        build.task.add_done_callback(functools.partial(self._on_over, build))
        self._tasks.add(build.task)
        return build

    async def _wait(self, build: _Build, user: str, listen: Listener) -> None:
        assert build.task is not None  # noqa: S101 - it was begun
        build.users.add(user)
        job = user.rpartition(".")[0].rpartition(".")[0]
        if job not in build.jobs:
            build.jobs.add(job)
            listen(build.output)
        try:
            await asyncio.shield(build.task)
        finally:
            build.users.discard(user)
            if not build.users:
                self._forget(build)  # at once: who comes now has it built anew
                build.task.cancel()

    def _forget(self, build: _Build) -> None:
        if self._builds.get(build.tag) is build:
            del self._builds[build.tag]

    def _on_over(self, build: _Build, task: asyncio.Task[None]) -> None:
        self._forget(build)
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it is raised to those that wait, if any are left
        self._sweep_soon()

    def release(self, user: str) -> None:
        """What `user` used may be removed to make room."""
        self._used.pop(user, None)

    # ---- one build --------------------------------------------------------------------------------------

    async def _make(self, build: _Build, recipe: ImageRecipe, base: str, workspace: Path | None) -> None:
        output, limit_s = build.output, self._settings.build_timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                alone(f"fluster-build-{recipe.key()}", lambda: output.begin("wait for a build of the same image here")),
            ):
                if await asked(self.store.use, recipe.tag()) is None:
                    await self._build(output, recipe, base, workspace)
        except TimeoutError as cause:
            raise BuildError(
                f"the image for its packages was not built within {limit_s:g} s; the last words:\n{output.last_words()}",
                output,
            ) from cause
        except EngineError as cause:
            raise BuildError(_reason(cause, output), output) from cause

    async def _build(self, output: BuildOutput, recipe: ImageRecipe, base: str, workspace: Path | None) -> None:
        uv = find_uv() if recipe.needs.lock is not None else None
        dockerfile = recipe.dockerfile(await self.find_python(base, recipe.needs.python))
        with tempfile.TemporaryFile() as context:
            await in_thread(lambda: self._write_context(context, recipe, dockerfile, workspace, uv))
            output.begin(f"docker build --tag {recipe.tag()} (upon {base})")
            builder = self._new_builder()
            try:
                await self._watched(self._follow(output, context, self._parameters(recipe, builder)))
            finally:
                self._builders.discard(builder)

    def _write_context(
        self, file: IO[bytes], recipe: ImageRecipe, dockerfile: str, workspace: Path | None, uv: Path | None
    ) -> None:
        path = self._settings.build_authorities
        write_context(
            file,
            recipe,
            dockerfile,
            workspace=workspace,
            variables=build_variables(os.environ),
            authorities=Path(path).read_text(encoding="utf-8") if path is not None else None,
            uv=uv,
        )

    def _parameters(self, recipe: ImageRecipe, builder: str) -> dict[str, str]:
        return {
            "t": recipe.tag(),
            "rm": "1",
            "forcerm": "1",
            "nocache": "1",
            "networkmode": self._settings.build_network or self._settings.network,
            "buildargs": json.dumps({BUILDER_ARGUMENT: builder}),
        }

    async def _follow(self, output: BuildOutput, context: IO[bytes], parameters: dict[str, str]) -> None:
        settings, cutter = self._settings, LineCutter(MAX_LINE_BYTES)
        try:
            async with aclosing(build_image(settings.engine, self._api_version, context, parameters)) as pieces:
                async for piece in pieces:
                    for text, _is_partial in cutter.feed(piece.encode(errors="replace")):
                        _add(output, text.decode(errors="replace"))
        finally:
            for text, _is_partial in cutter.finish():
                _add(output, text.decode(errors="replace"))

    async def _watched(self, work: Coroutine[object, None, None]) -> None:
        """Do `work`, and raise EngineError when the engine that it waits for does not answer."""
        working, watching = asyncio.create_task(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watching.result()
            working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Raise EngineError when the engine does not answer, though a connection is open: a build may be silent for long."""
        while True:
            await asyncio.sleep(_WATCH_S)
            await asked(self.store.ping)

    def _new_builder(self) -> str:
        builder = f"{self._state}#{secrets.token_hex(4)}"
        self._builders.add(builder)
        self._is_untidy = True
        return builder

    # ---- what goes --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin with removing what builds of an earlier run have left."""
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if self._is_closing:
            return
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._sweeping = asyncio.create_task(self._sweep(), name="sweep after builds of images")

    async def _sweep(self) -> None:
        for pause in _SWEEPS_S:
            await asyncio.sleep(pause)
            try:
                await self._clean()
                await self.evict()
            except EngineError as error:
                _log.warning("what builds of images have left stays for now: %s", error)

    async def _clean(self) -> bool:
        """Remove what builds that are over have left; whether there is nothing more of it."""

        def is_over(builder: str, age_s: float) -> bool:
            return is_leftover(builder, state=self._state, building=self._builders, age_s=age_s, others_s=_OTHERS_S)

        is_clean = await asked(self.store.remove_leftovers, is_over)
        self._is_untidy = not is_clean or bool(self._builders)
        return is_clean

    async def evict(self) -> None:
        images = await asked(self.store.built)
        excess = len(images) - self._settings.max_images
        for tag in least_recently_used(images, spared=self._used.values(), used_before=time.time() - _FRESH_S):
            if excess <= 0:
                return
            # Attempts that want it from here on find it, or build it again; those that use it have it in a container.
            if await asked(self.store.remove, tag):
                _log.info("image %s goes: there are more than %d", tag, self._settings.max_images)
                excess -= 1

    async def close(self) -> None:
        """Stop what is being built, and remove what it has left, if the engine does so soon."""
        self._is_closing = True
        tasks = set(self._tasks)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if not self._is_untidy:
            return
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(_LEAVING_S):
                for _ in range(round(_LEAVING_S / _LOOK_S)):
                    if await self._clean():
                        return
                    await asyncio.sleep(_LOOK_S)


def _add(output: BuildOutput, line: str) -> None:
    line = without_codes(line)  # an engine shows errors in red, also where a line of its own begins
    if _STEP.match(line):
        output.begin(line)
    elif line and not line.startswith(
        (" ---> ", "Removing intermediate container ")
    ):  # numbers without meaning to users
        output.add(line)


def _reason(error: EngineError, output: BuildOutput) -> str:
    words = output.last_words()
    if _DISK_FULL.search(f"{error} {words}"):
        error_text = (
            f"the disk of the Docker engine is full: make room there (`docker system df` tells what takes it); {error}"
        )
    else:
        error_text = f"the image for its packages could not be built: {error}"
    return f"{error_text}; the last words:\n{words}" if words else error_text
