"""The GPUs of one attempt, as its keeper holds them: their locks from before its task begins until all of it has ended."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fluster.progress_file import DIRECTORY_VARIABLE
from fluster_services.worker.contract.attempt_directory import LaunchSpec
from fluster_services.worker.gpus.holders import Holder, described
from fluster_services.worker.gpus.locks import GpuLock, GpuTakenError


class HeldGpus:
    """The locks of an attempt's GPUs; none for an attempt without any."""

    def __init__(self) -> None:
        self._locks: list[GpuLock] = []
        self._holder: Holder | None = None

    @property
    def fds(self) -> list[int]:
        """What the task is to inherit: it has its GPUs for as long as one of its processes has these open."""
        return [lock.fd for lock in self._locks]

    def take(self, spec: LaunchSpec, directory: Path, *, since_boot_s: float) -> None:
        """Take all of them, and leave a note in each. Raises GpuTakenError, OSError; then none is held."""
        if not spec.gpu_locks:
            return
        self._holder = Holder.here(
            spec.key,
            since_boot_s=since_boot_s,
            mark=f"{DIRECTORY_VARIABLE}={directory}",
            groups=list(spec.groups),
            container=spec.container.name if spec.container is not None else "",
            engine=spec.container.engine if spec.container is not None else "",
        )
        try:
            for path, gone in sorted(spec.gpu_locks.items()):  # in one order for all that take several
                self._take(GpuLock(Path(path)), gone)
        except BaseException:
            self.release()
            raise

    def _take(self, lock: GpuLock, gone: str) -> None:
        assert self._holder is not None  # noqa: S101 - `take` has made it
        try:
            lock.take(gone=gone)
            lock.write_note(self._holder.as_note())
        except GpuTakenError as cause:
            note = lock.note()
            lock.close()
            raise GpuTakenError(
                f"{described(note)} has {lock.path.name.removeprefix('fluster-gpu-')}: {cause}"
            ) from cause
        except BaseException:
            lock.close()
            raise
        self._locks.append(lock)

    def on_begun(self, task_pid: int) -> None:
        """Name the task's process as well, by whose session what is left of it is found."""
        if self._holder is None:
            return
        note = self._holder.begun(task_pid).as_note()
        for lock in self._locks:
            with suppress(OSError):  # a full disk: the environment of its processes tells who they are
                lock.write_note(note)

    def release(self) -> None:
        """All of the task has ended: the next one may take them."""
        for lock in self._locks:
            with suppress(OSError):
                lock.clear_note()
        self.leave()

    def leave(self) -> None:
        """Let go of them without a word: their next holder proves that nothing of the task is left."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()
        self._holder = None
