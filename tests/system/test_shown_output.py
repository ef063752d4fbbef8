"""What actors and pool workers write, on the stderr of the program that has them."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from fluster import Cluster, Entrypoint, JobRequest, JobStatus, LocalCluster, WorkerPool, current_cluster, deploy
from tests.system.processes import Family
from tests.waiting import wait_until


class Parrot:
    def say(self, *words: str) -> None:
        for word in words:
            print(word)

    def complain(self, word: str) -> None:
        print(word, file=sys.stderr)

    def die(self, word: str) -> None:
        print(word)
        os._exit(3)


def say(word: str) -> None:
    print(word)


def deploy_in_job() -> None:
    with deploy(current_cluster(), Parrot, name="grandchild") as parrots:
        parrots.call().say("of a job")
    with WorkerPool(current_cluster(), 1, name_prefix="nested") as pool:
        pool.submit(say, "of a job").result()


def lines_of(text: str, name: str) -> list[str]:
    """What the members of `name` wrote, each after its label."""
    return [line for line in text.splitlines() if line.startswith(f"{name}[")]


def test_prints_reach_the_program_before_its_cluster_is_closed(
    family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(log_to_driver=True) as cluster:
        parrots = deploy(cluster, Parrot, name="parrot", replicas=2)
        parrots.broadcast().say("both").results()
        pool = WorkerPool(cluster, 1)
        pool.map(say, ["from a worker"]).results()
        parrots.call().complain("the last")
    written = capsys.readouterr().err
    shown = lines_of(written, "parrot")
    assert sorted(shown[:2]) == ["parrot[0] | both", "parrot[1] | both"]
    assert [line.partition(" | ")[2] for line in shown[2:]] == ["the last"]
    assert lines_of(written, pool.name) == [f"{pool.name}[0] | from a worker"]


def test_prints_of_what_jobs_deploy_reach_the_program_too(family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalCluster(log_to_driver=True) as cluster:
        job_id = cluster.launch(JobRequest(name="deploys", entrypoint=Entrypoint(callable=deploy_in_job)))
        assert cluster.wait(job_id).status is JobStatus.SUCCEEDED
    written = capsys.readouterr().err
    assert lines_of(written, "grandchild") == ["grandchild[0] | of a job"]
    assert [line.partition("[")[2] for line in written.splitlines() if line.startswith("nested")] == ["0] | of a job"]


def test_a_flood_is_shown_as_its_beginning_and_a_count(
    family: Family, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in ("_LAST_OUTPUT_S", "_WRITE_S"):  # else a busy machine has not shown it all
        monkeypatch.setattr(f"fluster.cluster.jobs.shown_output.{patience}", 60.0)
    with LocalCluster(log_to_driver=True) as cluster:
        parrot = deploy(cluster, Parrot, name="parrot")
        parrot.call().say(*map(str, range(5_000)))
        parrot.shutdown()  # all is shown by then, while the cluster goes on
        shown = lines_of(capsys.readouterr().err, "parrot")
    assert shown[0] == "parrot[0] | 0"
    assert len(shown) < 1_000
    assert "more lines in that second" in shown[-1]


@pytest.mark.parametrize("log_to_driver", [None, False])
def test_unasked_only_the_last_lines_of_what_failed_are_shown(
    family: Family, capfd: pytest.CaptureFixture[str], log_to_driver: bool | None
) -> None:
    with LocalCluster(log_to_driver=log_to_driver) as cluster:
        parrots = deploy(cluster, Parrot, name="parrot", replicas=2)
        parrots.broadcast().say("quiet").results()
        first = next(member for member in parrots.members() if member.task == 0)
        parrots.to(first).submit().die("farewell")
        seen: list[str] = []

        def shown() -> list[str]:
            seen.extend(lines_of(capfd.readouterr().err, "parrot"))
            return seen if "parrot[0] | farewell" in seen else []

        wait_until(shown)
    assert seen == ["parrot[0] | quiet", "parrot[0] | farewell"]


_PROGRAM = """
from fluster import LocalCluster, WorkerPool
def say(word):
    print(word)
cluster = LocalCluster()
WorkerPool(cluster, 1, name_prefix="w").submit(say, "seen " + "on a terminal" + chr(27) + "[6n").result()  # which asks a terminal to type
"""


def test_on_a_terminal_they_are_shown_also_when_the_program_just_ends(family: Family, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    terminal, its_end = pty.openpty()
    process = subprocess.Popen([sys.executable, program], stderr=its_end, cwd=tmp_path)
    os.close(its_end)
    written = b""
    try:
        while part := os.read(terminal, 4_096):
            written += part
    except OSError:  # by this Linux says that the last writer has closed it
        pass
    finally:
        os.close(terminal)
    assert process.wait() == 0
    assert r"[0] | seen on a terminal\x1b[6n" in written.decode()


def test_on_a_shared_cluster_they_are_shown_when_asked_for(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with Cluster(cluster.address) as shared:
        with WorkerPool(shared, 1, name_prefix="asked", logs=True) as asked, WorkerPool(shared, 1) as unasked:
            asked.submit(say, "loud").result()
            unasked.submit(say, "silent").result()
        parrot = deploy(shared, Parrot, name="asked-parrot", logs=True)
        parrot.call().say("loud", "too")
        parrot.shutdown()
        written = capsys.readouterr().err
        assert lines_of(written, asked.name) == [f"{asked.name}[0] | loud"]
        assert lines_of(written, "asked-parrot") == ["asked-parrot[0] | loud", "asked-parrot[0] | too"]
        assert "silent" not in written
        with (
            WorkerPool(shared, 1, logs=True) as pool,
            WorkerPool(shared, 1) as other,
        ):
            pool.submit(deploy_in_job).result()
            seen: list[str] = []

            def shown() -> list[str]:
                seen.extend(lines_of(capsys.readouterr().err, "grandchild"))
                return seen

            assert wait_until(shown) == ["grandchild[0] | of a job"]
            other.submit(deploy_in_job).result()
        assert "grandchild" not in capsys.readouterr().err
        assert [line.text for line in unasked.logs()] == ["silent"]


def test_a_pool_has_what_was_written_as_soon_as_a_result_is_there(cluster: Cluster) -> None:
    with WorkerPool(cluster, 2) as pool, deploy(cluster, Parrot, name="prompt") as parrots:
        for turn in range(20):
            words = [f"{turn}.{number}" for number in range(4)]
            pool.map(say, words, chunksize=1).results()
            assert set(words) <= {line.text for line in pool.logs()}
            parrots.call().say(*words)
            assert [line.text for line in parrots.logs(tail=4)] == words


def test_a_pool_has_the_output_of_all_its_workers(cluster: Cluster) -> None:
    with WorkerPool(cluster, 1) as pool:
        pool.submit(say, "one").result()
        pool.resize(2)  # which is another job
        pool.wait_for_workers(2)
        pool.submit(say, "two").result()
        pool.shutdown()
        assert [line.text for line in pool.logs()] == ["one", "two"]
        assert [line.text for line in pool.logs(tail=1)] == ["two"]
        assert [line.text for line in pool.logs(grep="on")] == ["one"]
        assert sorted(line.text for line in pool.logs(follow=True)) == ["one", "two"]
