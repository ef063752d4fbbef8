"""Arrays as a user submits them."""

import itertools
from pathlib import Path

from fluster.cluster import LocalCluster
from fluster_bus.messages import JobStatus
from tests.system.job_requests import command, texts

_STEP = {"+": 1, "-": -1}


def test_tasks_of_an_array_are_independent_and_so_many_at_once(cluster: LocalCluster, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    script = f"echo + >>{journal}; echo $FLUSTER_ARRAY_ID; sleep 0.5; echo - >>{journal}; test $FLUSTER_ARRAY_ID != 3"
    job_id = cluster.launch(command("sh", "-c", script, array="1-15:2%2"))
    info = cluster.wait(job_id, timeout=60)
    assert info.status is JobStatus.FAILED
    failed = [task.task for task in info.tasks if task.status is JobStatus.FAILED]
    assert failed == [1]
    assert sum(task.status is JobStatus.SUCCEEDED for task in info.tasks) == 7
    assert sorted(map(int, texts(cluster, job_id))) == list(range(1, 16, 2))
    running = list(itertools.accumulate(_STEP[line] for line in journal.read_text().split()))
    assert max(running) == 2
    assert running[-1] == 0


def test_an_array_says_why_its_tasks_wait(cluster: LocalCluster) -> None:
    job_id = cluster.launch(command("sh", "-c", "echo ready; exec sleep 600", array="0-2%1"))
    lines = cluster.logs(job_id, follow=True)
    next(iter(lines))
    lines.close()  # type: ignore[attr-defined]  # it is a generator
    assert cluster.explain(job_id) == "2 of 3 tasks wait, since at most 1 may run at once (0-2%1)"
    cluster.terminate(job_id)
    info = cluster.wait(job_id, timeout=60)
    assert {task.status for task in info.tasks} == {JobStatus.KILLED}
