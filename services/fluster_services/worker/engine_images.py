"""The images that jobs run in, at one worker's engine: those that are missing are pulled, each once."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fluster_bus.core.json_types import JsonObject
from fluster_bus.messages.parts.images import UsedImage, digest_of, engine_name, split_name
from fluster_services.capacity import describe_bytes
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.faults import BuildOutput, says_no_room
from fluster_services.worker.engine import (
    EngineAwayError,
    EngineError,
    EngineSilentError,
    NotThereError,
    asked,
    connect,
    told,
)

_log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two words about a pull
_LINE_S = 15.0  # between two lines of it in the logs of jobs
_HERE = ("Already exists", "Pull complete")
_LOADED = ("Verifying Checksum", "Download complete", "Extracting", *_HERE)
_STATES = (
    "Pulling fs layer",
    "Waiting",
    "Retrying",
    "Downloading",
    *_LOADED,
)  # of a layer; other steps have a tag as their id


@dataclass
class _Coming:
    """An image that is looked for, or pulled."""

    output: BuildOutput = field(default_factory=BuildOutput)
    listeners: dict[str, Callable[[BuildOutput], None]] = field(default_factory=dict)  # {job: of one of its attempts}
    is_pulled: bool = False
    task: asyncio.Task[UsedImage] | None = None

    def listen(self, job: str, listener: Callable[[BuildOutput], None]) -> None:
        """Tell `listener` of the pull, if there is one or once it begins."""
        self.listeners[job] = listener
        if self.is_pulled:
            listener(self.output)

    def begin(self, image: str) -> None:
        """The pull begins."""
        self.is_pulled = True
        self.say(f"pulling image {image}", is_line=True)
        for listener in self.listeners.values():
            listener(self.output)

    def say(self, text: str, *, is_line: bool) -> None:
        """What is being done now."""
        self.output.doing = text
        if is_line:
            self.output.add(text)


class Images:
    """Has images ready before what needs them starts."""

    def __init__(self, settings: ContainerSettings, api_version: str) -> None:
        self.settings = settings
        self.api_version = api_version
        self._coming: dict[str, _Coming] = {}  # {image: what finds or brings it}

    async def use(
        self,
        image: str | None,
        user: str = "",
        listen: Callable[[BuildOutput], None] | None = None,
        *,
        earlier: UsedImage | None = None,
    ) -> UsedImage:
        """An image that is there: `image`, or the default one; the same as `earlier`, if that had its name and is of a registry.

        If it has to be pulled, `listen` gets what is said meanwhile, of one user of each job. Raises EngineError.
        """
        name = image or self.settings.image
        if earlier is not None and earlier.name == name and earlier.exact is not None:
            here = await asked(self._look, name)
            if here is None or not here.is_same(earlier):
                _log.info("image %s is another one here: %s is used", name, earlier)
                return (await self._ready(earlier.exact, user, listen)).model_copy(update={"name": name})
        return await self._ready(name, user, listen)

    async def _ready(self, name: str, user: str, listen: Callable[[BuildOutput], None] | None) -> UsedImage:
        coming = self._coming.get(name)
        if coming is None:
            coming = self._coming[name] = _Coming()
            coming.task = asyncio.create_task(self._bring(name, coming))
            coming.task.add_done_callback(functools.partial(self._on_over, name))
        assert coming.task is not None  # noqa: S101 - it was begun
        job = user.rpartition(".")[0].rpartition(".")[0]
        is_first = listen is not None and job not in coming.listeners
        if listen is not None and is_first:
            coming.listen(job, listen)
        try:
            return await asyncio.shield(coming.task)  # others may wait for it, too
        finally:
            if is_first:
                del coming.listeners[job]

    async def _bring(self, name: str, coming: _Coming) -> UsedImage:
        found = await asked(self._look, name)
        if found is not None:
            return found
        _log.info("image %s is pulled", name)
        coming.begin(name)
        await asked(self._pull, name, coming, asyncio.get_running_loop())
        pulled = await asked(self._look, name)
        if pulled is None:
            raise EngineError(f"image {name!r} was pulled, and was removed again from outside")
        _log.info("image %s is %s", name, pulled)
        return pulled

    def _on_over(self, name: str, task: asyncio.Task[UsedImage]) -> None:
        del self._coming[name]
        if not task.cancelled():
            task.exception()  # it is raised to those that wait, if any do

    def _look(self, name: str) -> UsedImage | None:
        """The image of that name, if it is there."""
        client = connect(self.settings.engine, timeout_s=self.settings.timeout_s, api_version=self.api_version)
        try:
            with told(self.settings.engine):
                found = client.inspect_image(engine_name(name))
            return UsedImage(name=name, id=found["Id"], digest=digest_of(name, found.get("RepoDigests") or ()))
        except NotThereError:
            return None
        finally:
            client.close()

    def _pull(self, name: str, coming: _Coming, loop: asyncio.AbstractEventLoop) -> None:
        settings = self.settings
        limit_s = settings.pull_timeout_s
        client = connect(settings.engine, timeout_s=limit_s, api_version=self.api_version, silence_s=limit_s)
        progress, began_at = PullProgress(name), time.monotonic()
        look_at, line_at = began_at, began_at + _LINE_S
        try:
            with told(settings.engine):
                repository, version = split_name(name)
                for step in client.pull(repository, version, stream=True, decode=True):
                    if "error" in step:
                        raise EngineError(f"the Docker engine at {settings.engine}: {step['error']}")
                    progress.on_step(step)
                    now = time.monotonic()
                    if now >= look_at:
                        _say(loop, coming, progress.text(), is_line=now >= line_at)
                        look_at = now + _LOOK_S
                        line_at = now + _LINE_S if now >= line_at else line_at
        except EngineSilentError:
            raise self._stalled(name) from None
        except EngineError as cause:
            # What a registry says is up to the job that names it: whether the engine has no room the worker finds by itself.
            is_away = isinstance(cause, EngineAwayError)
            message = f"there is no image {name!r} here, and it cannot be pulled: {cause}"
            if says_no_room(str(cause)):
                message = f"there is no room for image {name!r}: `docker system prune` frees what its engine does not need; {cause}"
            raise EngineError(message) from (cause if is_away else None)
        finally:
            client.close()
        _say(loop, coming, f"image {name} is there, after {time.monotonic() - began_at:.1f} s", is_line=True)

    def _stalled(self, name: str) -> EngineError:
        """Why a pull came to a stand: an engine that answers waits for the registry, which is up to the job that names it.

        Raises EngineAwayError where it does not.
        """
        self._look(name)
        limit_s = self.settings.pull_timeout_s
        return EngineError(
            f"there is no image {name!r} here, and it cannot be pulled: nothing of it came for {limit_s:g} s, though the "
            f"Docker engine at {self.settings.engine} answers: see whether its registry sends it to others"
        )


def _say(loop: asyncio.AbstractEventLoop, coming: _Coming, text: str, *, is_line: bool) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(functools.partial(coming.say, text, is_line=is_line))


class PullProgress:
    """The layers of one image. Of those whose download has not begun the sizes are not known."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._states: dict[str, str] = {}  # {layer: as the engine names it}
        self._loaded: dict[str, int] = {}  # {layer: bytes that are there}
        self._sizes: dict[str, int] = {}

    def on_step(self, step: JsonObject) -> None:
        """The engine told a step."""
        layer, state = step.get("id"), str(step.get("status"))
        if layer is None or not state.startswith(_STATES):
            return
        self._states[layer] = state
        detail = step.get("progressDetail") or {}
        if state == "Downloading" and detail.get("total", 0) > 0:
            self._sizes[layer] = detail["total"]
            self._loaded[layer] = detail.get("current", 0)
        elif state.startswith(_LOADED):
            self._loaded[layer] = self._sizes.setdefault(layer, 0)

    def text(self) -> str:
        """One line about it."""
        count = len(self._states)
        here = sum(state.startswith(_HERE) for state in self._states.values())
        if not count:
            return f"pulling image {self._image}"
        layers = f"{here} of {count} layers are there"
        if all(state.startswith(_LOADED) for state in self._states.values()):
            return f"unpacking image {self._image}: {layers}"
        size = describe_bytes(sum(self._sizes.values()))
        most = size if len(self._sizes) == count else f"at least {size}"
        return f"pulling image {self._image}: {describe_bytes(sum(self._loaded.values()))} of {most}, {layers}"
