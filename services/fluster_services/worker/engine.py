"""A Docker Engine, as workers and keepers reach it: by the `docker` SDK, which is imported where it is asked for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from fluster.local_setup import RuntimeName
from fluster_services.worker.contract.config import ContainerSettings
from fluster_services.worker.contract.container import Container
from fluster_services.worker.contract.faults import LaunchError, WorkerFaultError, says_no_room

if TYPE_CHECKING:
    import docker

Result = TypeVar("Result")

_HANDSHAKE_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)


class EngineError(LaunchError):
    """The engine did not do what it was asked for; the text tells which one, and why."""


class EngineAwayError(EngineError, WorkerFaultError):
    """It does not answer."""


class EngineSilentError(EngineAwayError):
    """It was reached, and said nothing in time."""


class EngineFullError(EngineError):
    """Its disk has no room, by its words: they may be those of a registry, or of what it was to run. `why_scarce` measures."""


class NotThereError(EngineError):
    """It knows no such container, or image."""


def connect(url: str, *, timeout_s: float, api_version: str, silence_s: float | None = None) -> docker.APIClient:
    """A client of the engine at `url`; connects when it is used. Raises EngineError.

    It waits `timeout_s` for each word, and without end where the SDK does, as for the steps of a pull: `silence_s` then.
    """
    import docker

    from fluster_services.worker.engine_socket import EngineSocket

    with told(url):
        client = docker.APIClient(url, version=api_version, timeout=timeout_s)
        client.mount("http+docker://", EngineSocket(url.removeprefix("unix://"), timeout_s, silence_s=silence_s))
        return client


def find_api_version(url: str) -> str:
    """What the engine at `url` and the SDK both speak. Raises EngineError when there is none that answers, or no SDK."""
    if not url.startswith("unix://"):
        raise EngineError(
            f"the Docker engine {url!r} cannot be used: give one of this machine, as unix:///path/to/its.sock"
        )
    try:
        from docker.constants import DEFAULT_DOCKER_API_VERSION
    except ImportError as cause:
        raise EngineError("containers need the docker SDK: pip install 'fluster[docker]'") from cause
    client = connect(url, timeout_s=_HANDSHAKE_TIMEOUT_S, api_version=DEFAULT_DOCKER_API_VERSION)
    try:
        with told(url):
            version = client.version(api_version=False).get("ApiVersion")
    finally:
        client.close()
    if not isinstance(version, str):
        raise EngineError(f"what answers at {url} is not a Docker engine: it told no version")
    return version


def data_folder(client: docker.APIClient) -> str:
    """Where the engine keeps its files, on its machine; empty when it does not tell."""
    return str(client.info().get("DockerRootDir") or "")


def remove_container(container: Container) -> None:
    """Have a container gone, whether it runs or is over, or was never there. Raises EngineError."""
    client = connect(container.engine, timeout_s=container.timeout_s, api_version=container.api_version)
    try:
        with suppress(NotThereError), told(container.engine):
            client.remove_container(container.name, force=True, v=True)
    finally:
        client.close()


def container_pid(container: Container) -> int | None:
    """The first process of a container, in this machine's numbers; None when it does not run. Raises EngineError."""
    client = connect(container.engine, timeout_s=_HANDSHAKE_TIMEOUT_S, api_version=container.api_version)
    try:
        with told(container.engine):
            return int(client.inspect_container(container.name)["State"]["Pid"]) or None
    finally:
        client.close()


def has_container(engine: str, api_version: str, name: str) -> bool | None:
    """Whether a container runs; None when the engine does not tell."""
    client = None
    try:
        client = connect(engine, timeout_s=_HANDSHAKE_TIMEOUT_S, api_version=api_version)
        with told(engine):
            return bool(client.inspect_container(name)["State"]["Running"])
    except NotThereError:
        return False
    except EngineError:
        return None
    finally:
        if client is not None:
            client.close()


async def asked(function: Callable[..., Result], *arguments: object) -> Result:
    """What `function` returns, which asks an engine, and may wait for it: in a thread of its own, which is not waited for.

    An engine that does not answer takes no thread that others need, and does not keep this process from ending.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if answer.done():  # the caller was cancelled
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # it is a Result unless there was an error

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=run, name="fluster-engine", daemon=True).start()
    except RuntimeError as cause:
        raise EngineAwayError(f"the Docker engine cannot be asked: {cause}") from cause
    return await answer


@contextmanager
def told(url: str) -> Iterator[None]:
    """Failures of the SDK as an EngineError that says whose they are."""
    import requests
    import urllib3
    from docker import errors

    try:
        yield
    except errors.NotFound as cause:
        raise NotThereError(f"the Docker engine at {url}: {cause.explanation}") from cause
    except errors.APIError as cause:
        kind = EngineFullError if says_no_room(str(cause)) else EngineError
        raise kind(f"the Docker engine at {url}: {cause.explanation or cause}") from cause
    except (requests.Timeout, TimeoutError, urllib3.exceptions.TimeoutError) as cause:
        raise EngineSilentError(f"the Docker engine at {url} did not answer in time") from cause
    except (errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as cause:
        raise EngineAwayError(f"the Docker engine at {url} cannot be reached: {_innermost(cause)}") from cause


def _innermost(error: BaseException) -> str:
    """What lies below the layers of the SDK: the reason that the system gave."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return str(error)


def choose_containers(runtime: RuntimeName, settings: ContainerSettings) -> ContainerSettings | None:
    """`settings`, or None for processes. "auto" takes containers where an engine answers; else there is none to be looked for."""
    if runtime == "process":
        return None
    if runtime == "auto":
        try:
            find_api_version(settings.engine)
        except EngineError as error:
            _log.info("tasks run as processes: %s", error)
            return None
    return settings
