"""The images that jobs run in, at one worker's engine: those that are missing are pulled, each once."""

from __future__ import annotations

import asyncio
import functools
import logging

from fluster_services.worker.container import ContainerSettings
from fluster_services.worker.engine import EngineError, NotThereError, asked, connect, told

_log = logging.getLogger(__name__)


class Images:
    """Has images ready before what needs them starts."""

    def __init__(self, settings: ContainerSettings, api_version: str) -> None:
        self.settings = settings
        self.api_version = api_version
        self._coming: dict[str, asyncio.Task[None]] = {}  # {image: what finds or brings it}

    async def use(self, image: str | None) -> str:
        """The name of an image that is there: `image`, or the default one. Raises EngineError."""
        name = image or self.settings.image
        coming = self._coming.get(name)
        if coming is None:
            coming = self._coming[name] = asyncio.create_task(self._bring(name))
            coming.add_done_callback(functools.partial(self._on_over, name))
        await asyncio.shield(coming)  # others may wait for it, too
        return name

    async def _bring(self, name: str) -> None:
        if not await asked(self._is_there, name):
            await asked(self._pull, name)

    def _on_over(self, name: str, coming: asyncio.Task[None]) -> None:
        del self._coming[name]
        if not coming.cancelled():
            coming.exception()  # whoever waited is told; nobody may have

    def _is_there(self, name: str) -> bool:
        client = connect(self.settings.engine, timeout_s=self.settings.timeout_s, api_version=self.api_version)
        try:
            with told(self.settings.engine):
                client.inspect_image(name)
            return True
        except NotThereError:
            return False
        finally:
            client.close()

    def _pull(self, name: str) -> None:
        from docker.utils import parse_repository_tag

        settings = self.settings
        client = connect(settings.engine, timeout_s=settings.pull_timeout_s, api_version=self.api_version)
        try:
            _log.info("image %s is pulled", name)
            with told(settings.engine):
                repository, tag = parse_repository_tag(name)
                for step in client.pull(repository, tag or "latest", stream=True, decode=True):
                    if "error" in step:
                        raise EngineError(f"the Docker engine at {settings.engine}: {step['error']}")
        except EngineError as cause:
            raise EngineError(f"there is no image {name!r} here, and it cannot be pulled: {cause}") from cause
        finally:
            client.close()
