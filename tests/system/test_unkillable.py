"""A process that SIGKILL does not end, as one that a driver or a network disk holds in the kernel."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from fluster.cluster import LocalCluster
from fluster_bus.messages import JobStatus, WorkerId
from tests import optional
from tests.system.job_requests import command, followed
from tests.waiting import wait_until

_TIMEOUT_S = 60
_FREEZER = Path("/sys/fs/cgroup/freezer")


@contextmanager
def _frozen() -> Iterator[Path]:
    """A group whose members the kernel lets neither run nor die; what is in it goes on when the block ends.

    Only groups of version 1 do that: those of version 2 let a frozen process die.
    """
    folder = _FREEZER / f"fluster-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "freezer.state").write_text("FROZEN")
    except OSError as error:
        optional.skip("freezer", f"a process that cannot be killed needs the freezer of cgroups v1: {error}")
    try:
        yield folder
    finally:
        (folder / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (folder / "cgroup.procs").read_text().strip())
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder)  # noqa: PTH106 - the files in it are the kernel's


def test_a_process_that_cannot_be_killed_is_reported_until_it_is_gone(cluster: LocalCluster, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job_id = cluster.launch(command("sh", "-c", f"sleep 600 & echo $!; read line <{gate}"))
    with followed(cluster, job_id) as lines:
        pid = int(next(line.text for line in lines if line.stream == "stdout"))
    worker_id = WorkerId(str(next(info for info in cluster.watch(job_id) if info.worker_id).worker_id))

    def problems() -> list[str]:
        return [each for each in cluster.worker_health(worker_id).problems if str(pid) in each]

    with _frozen() as group:
        (group / "cgroup.procs").write_text(str(pid))
        gate.write_text("end\n")
        info = cluster.wait(job_id, timeout=_TIMEOUT_S)
        assert info.status is JobStatus.SUCCEEDED, "the program itself has ended as it was to"
        (told,) = problems()
        assert told.startswith("of default.command-")
        assert told.endswith(f", process {pid} survives SIGKILL, so it hangs in the kernel and keeps what it has")
        assert psutil.pid_exists(pid)
    wait_until(lambda: problems() == [])
