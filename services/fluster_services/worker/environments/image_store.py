"""The images that were built for jobs, and what is left of builds, as one engine has them. Every call waits for the engine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING

from fluster_bus.core.json_types import JsonObject
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.container import NOBODY
from fluster_services.worker.engine import EngineError, NotThereError, connect, told
from fluster_services.worker.environments.image_recipe import (
    BUILDER_LABEL,
    INSTALLER,
    KEY_LABEL,
    PYTHON_LABEL,
    BuiltImage,
)

if TYPE_CHECKING:
    import docker

_LOOK_TIMEOUT_S = 60.0
_MINOR = re.compile(r"\d+\.\d+")


class ImageStore:
    """All of it raises EngineError."""

    def __init__(self, settings: ContainerSettings, api_version: str) -> None:
        self._settings = settings
        self._api_version = api_version

    @contextmanager
    def _client(self) -> Iterator[docker.APIClient]:
        settings = self._settings
        client = connect(settings.engine, timeout_s=settings.timeout_s, api_version=self._api_version)
        try:
            with told(settings.engine):
                yield client
        finally:
            client.close()

    def ping(self) -> None:
        with self._client() as client:
            client.ping()

    def base_id(self, name: str) -> str:
        """The ID of an image that something can be built upon."""
        with self._client() as client:
            image = client.inspect_image(name)
        if KEY_LABEL in (image["Config"]["Labels"] or {}):
            raise EngineError(
                f"image {name!r} was built for packages itself: name the one below, and give all packages"
            )
        return str(image["Id"])

    def use(self, tag: str) -> str | None:
        """The version of Python in a built image, which counts as used now; None when it is not there."""
        repository, _, version = tag.partition(":")
        try:
            with self._client() as client:
                labels = client.inspect_image(tag)["Config"]["Labels"] or {}
                client.tag(tag, repository, version)  # the engine notes when
        except NotThereError:
            return None
        return str(labels.get(PYTHON_LABEL, ""))

    def find_python(self, image: str, name: str | None, builder: str) -> str:
        """The version, such as 3.12, of the Python that `name` means in an image."""
        import docker.errors

        missing = f"no Python {name!r}" if name is not None else "no python3"
        refusal = (
            f"image {image!r} has {missing} to install packages for: name another image, or leave the packages out"
        )
        with self._client() as client:
            command = ["python3", "-I", "-c", INSTALLER, "look", *([name] if name is not None else [])]
            made = client.create_container(
                image,
                command=command,
                entrypoint=[],
                user=f"{NOBODY}:{NOBODY}",
                labels={BUILDER_LABEL: builder},
                host_config=client.create_host_config(network_mode="none"),
            )["Id"]
            try:
                try:
                    client.start(made)
                except docker.errors.APIError as cause:
                    if "executable file not found" in str(cause) or "no such file" in str(cause):
                        raise EngineError(refusal) from cause
                    raise
                status = client.wait(made, timeout=_LOOK_TIMEOUT_S)["StatusCode"]
                said: str = client.logs(made, stdout=True, stderr=True).decode(errors="replace").strip()
            finally:
                with suppress(NotThereError), told(self._settings.engine):
                    client.remove_container(made, force=True, v=True)
        if status != 0 or not _MINOR.fullmatch(said):
            raise EngineError(f"{refusal} ({said[-500:]})")
        return said

    def built(self) -> list[BuiltImage]:
        """Those that are there under their names."""
        found = []
        with self._client() as client:
            for image in client.images(filters={"label": KEY_LABEL, "dangling": False}):
                for tag in image["RepoTags"] or ():
                    with suppress(NotThereError), told(self._settings.engine):
                        found.append(BuiltImage(tag, _used_at(client.inspect_image(tag))))
        return found

    def remove(self, tag: str) -> bool:
        """Whether an image is gone, with the layers that only it has: not while a container has it."""
        try:
            with self._client() as client:
                client.remove_image(tag)
        except NotThereError:
            return True
        except EngineError:
            return False
        return True

    def remove_leftovers(self, is_leftover: Callable[[str, float], bool]) -> bool:
        """Remove what builds left that are over, by (its label, its age in seconds); whether nothing of them is left."""
        is_clean = True
        with self._client() as client:
            for container in client.containers(all=True, filters={"label": BUILDER_LABEL}):
                if is_leftover(container["Labels"][BUILDER_LABEL], time.time() - container["Created"]):
                    is_clean &= self._remove(client.remove_container, container["Id"], force=True, v=True)
            for label in (BUILDER_LABEL, KEY_LABEL):
                for image in client.images(filters={"label": label, "dangling": True}):
                    labels = image["Labels"]
                    if is_leftover(labels.get(BUILDER_LABEL, ""), time.time() - image["Created"]):
                        is_clean &= self._remove(client.remove_image, image["Id"])
        return is_clean

    def _remove(self, remove: Callable[..., object], name: str, **options: bool) -> bool:
        """Whether it is gone. The engine may be removing it already, or use it for a moment more."""
        try:
            with told(self._settings.engine):
                remove(name, **options)
        except NotThereError:
            return True
        except EngineError:
            return False
        return True


def _used_at(image: JsonObject) -> float:
    text = re.sub(r"(\.\d{6})\d+", r"\1", image["Metadata"]["LastTagTime"])
    return datetime.fromisoformat(text).timestamp()
