"""Submits jobs: packs and stores what they need of this program, and puts their requests into the submit stream."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fluster.cluster.jobs.job_states import JobStates, once_back
from fluster.cluster.task.task_context import TaskIdentity
from fluster.cluster.workspaces import with_stored_workspaces
from fluster.errors import JobRefusedError
from fluster.progress_file import DIRECTORY_VARIABLE
from fluster.tracing import job_environment
from fluster_bus.connection.bus import Bus
from fluster_bus.core.names import unique_name
from fluster_bus.messages import JobId, JobRequest, Namespace, WorkerId
from fluster_bus.messages.parts.origin import Origin
from fluster_bus.storage.stored_messages import MAX_SECRETS_BYTES, SecretStore
from fluster_bus.storage.submitting import submit

_SUBMITS_AT_ONCE = 128


class Submissions:
    """Submits the jobs of one client: stores what they need of this program, and then their requests, in the submit
    stream.

    `identity` is the task that this program is in that cluster, if it is one. Of many jobs `at_once` are sent at the
    same time.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: Namespace,
        states: JobStates,
        identity: TaskIdentity | None,
        *,
        at_once: int = _SUBMITS_AT_ONCE,
    ) -> None:
        self._bus = bus
        self._namespace = namespace
        self._states = states
        self._identity = identity
        self._at_once = at_once

    async def launch(self, requests: Sequence[JobRequest]) -> list[JobId]:
        """The ids of the jobs, in order, once they are recorded or stored. Raises as `AsyncCluster.launch_many`
        does.
        """
        named = await self._named(requests)
        await self._states.confirm(await self._store(named))
        return list(named)

    async def run_on_worker(self, worker_id: WorkerId, request: JobRequest) -> JobId:
        """The id of the job that the worker runs now. Raises as `AsyncCluster.run_on_worker` does."""
        from fluster.cluster.workers import run_on_worker

        ((job_id, named),) = (await self._named([request])).items()
        draft = await self._draft(named.model_copy(update={"job_id": job_id, **self.parent_of(named)}))
        reply = await run_on_worker(self._bus, worker_id, self._namespace, draft)
        if not reply.claimed:
            self._states.expect({reply.job_id: reply.submission})
        return reply.job_id

    async def _named(self, requests: Sequence[JobRequest]) -> dict[JobId, JobRequest]:
        """The requests with what the cluster is to find of this program stored, each by the id that its job is to
        have.
        """
        _check_distinct(requests)
        check_secrets(requests)
        requests = await with_stored_workspaces(self._bus, self._namespace, requests)
        requests = with_origin(traced(requests))
        return {request.job_id or JobId(unique_name(request.name)): request for request in requests}

    async def _store(self, requests: Mapping[JobId, JobRequest]) -> dict[JobId, int]:
        """The jobs' places in the submit stream. After one that cannot be stored no more are sent, and that is
        raised.
        """
        room = asyncio.Semaphore(self._at_once)
        storing: dict[JobId, asyncio.Task[None]] = {}
        stored: dict[JobId, int] = {}
        errors: list[Exception] = []

        async def store(job_id: JobId, request: JobRequest, earlier: list[asyncio.Task[None]]) -> None:
            if earlier:
                await asyncio.wait(earlier)
            async with room:
                if errors:
                    return
                draft = request.model_copy(update={"job_id": job_id, **self.parent_of(request)})
                try:
                    stored[job_id] = await self.submit(draft)
                except Exception as error:
                    errors.append(error)

        for job_id, request in requests.items():
            earlier = [storing[each] for each in request.after if each in storing]
            storing[job_id] = asyncio.create_task(store(job_id, request, earlier))
        await asyncio.gather(*storing.values())
        self._states.expect(stored)
        if errors:
            if stored:
                errors[0].add_note(f"of the jobs launched together these were stored, and go on: {', '.join(stored)}")
            raise errors[0]
        return {job_id: stored[job_id] for job_id in requests}

    def parent_of(self, request: JobRequest) -> dict[str, object]:
        """What a request says of the task that launches it; nothing outside of a job."""
        identity = self._identity
        if request.parent is not None or request.detached or identity is None or identity.namespace != self._namespace:
            return {}
        return {"parent": identity.job_id, "parent_task": identity.task, "parent_attempt": identity.attempt}

    async def submit(self, request: JobRequest) -> int:
        """The job's place in the submit stream, once it is stored there. Raises StorageError, and what `Bus.request`
        raises.
        """
        draft = await self._draft(request)
        return await once_back(lambda: submit(self._bus, self._namespace, draft, message_id=str(draft.submission)))

    async def _draft(self, request: JobRequest) -> JobRequest:
        """The request as it is submitted, its secrets stored."""
        # By its random part the stream, and the controller where that forgot it, drop what this call sends twice, yet
        # not what another call sends under the same id.
        message_id = unique_name(f"{self._namespace}.{request.job_id}")
        if request.environment.secrets:
            await self._store_secrets(request, message_id)
        return request.model_copy(update={"submission": message_id})

    async def _store_secrets(self, request: JobRequest, submission: str) -> None:
        """Before the job, so that no worker looks for them in vain."""
        values = secrets_of(request)
        await once_back(lambda: SecretStore(self._bus, self._namespace).put(submission, values))


def _check_distinct(requests: Sequence[JobRequest]) -> None:
    for job_id, count in Counter(request.job_id for request in requests if request.job_id is not None).items():
        if count > 1:
            raise JobRefusedError(
                f"none of them was sent: job_id={job_id!r} is that of {count} of these {len(requests)} jobs: give each "
                "its own, or leave it out"
            )


# ---- what jobs take of this program -------------------------------------------------------------------


def traced(requests: Sequence[JobRequest]) -> Sequence[JobRequest]:
    """Jobs that continue the caller's trace, if it is in one; what they say of it themselves stays."""
    variables = job_environment()
    if not variables:
        return requests
    return [
        request
        if "TRACEPARENT" in request.environment.env_vars
        else request.model_copy(
            update={
                "environment": request.environment.model_copy(
                    update={"env_vars": {**request.environment.env_vars, **variables}}
                )
            }
        )
        for request in requests
    ]


def with_origin(requests: Sequence[JobRequest]) -> list[JobRequest]:
    """The same requests; commands that do not say where they come from are from this process's folder and PATH."""
    if all(request.entrypoint.command is None or request.origin is not None for request in requests):
        return list(requests)
    origin = Origin.here(folder=_folder())
    return [
        request.model_copy(update={"origin": origin})
        if request.entrypoint.command is not None and request.origin is None
        else request
        for request in requests
    ]


def _folder() -> Path | None:
    """The present folder; None in a task's own one, which is gone when the task has ended."""
    try:
        folder = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return None
    attempt = os.environ.get(DIRECTORY_VARIABLE)
    if attempt is not None and folder.is_relative_to(Path(attempt).resolve()):
        return None
    return folder


def check_secrets(requests: Iterable[JobRequest]) -> None:
    """Raise ValueError when a variable that a job names as a secret is not set here, or all together are too large."""
    for request in requests:
        secrets_of(request)


def secrets_of(request: JobRequest) -> dict[str, str]:
    """{variable: value} of those that the job names, from this process's environment. Raises ValueError."""
    names = request.environment.secrets
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"secrets: {', '.join(missing)} not set in this program's environment: set the variable before the "
            "launch, or "
            "leave it out"
        )
    values = {name: os.environ[name] for name in names}
    size = len(json.dumps(values))
    if size > MAX_SECRETS_BYTES:
        raise ValueError(f"secrets: {size:,} bytes in all, over the limit of {MAX_SECRETS_BYTES:,}")
    return values
