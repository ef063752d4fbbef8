"""How people name jobs at the command line, and what becomes of names that fit none."""

import json
import uuid

from fluster_bus.messages import JobId, JobStatus
from tests.system.test_cli import Cli, cli  # noqa: F401 - a fixture


def _prefix() -> str:
    return f"t{uuid.uuid4().hex[:8]}"


def test_cancel_does_what_it_can_and_reports_the_rest(cli: Cli) -> None:  # noqa: F811
    first, second = (cli.ok("submit", "--", "sleep", "600").strip() for _ in range(2))
    done = cli.run("cancel", first, "zzz", second, first)
    assert (done.returncode, done.stdout.split()) == (4, [first, second])
    assert "no job 'zzz'" in done.stderr
    for job_id in (first, second):
        assert cli.cluster.wait(JobId(job_id), timeout=60).status is JobStatus.KILLED


def test_cancel_tells_programs_what_it_did_also_when_an_id_fits_none(cli: Cli) -> None:  # noqa: F811
    job_id = cli.ok("submit", "--", "sleep", "600").strip()
    done = cli.run("--output", "json", "cancel", "zzz", job_id)
    assert (done.returncode, json.loads(done.stdout)) == (4, [{"job_id": job_id}])


def test_a_beginning_means_unfinished_jobs_first(cli: Cli) -> None:  # noqa: F811
    prefix = _prefix()
    cli.ok("submit", "--job-id", f"{prefix}-1", "--wait", "--", "true")
    assert cli.json("status", prefix)["job_id"] == f"{prefix}-1"
    cli.ok("submit", "--job-id", f"{prefix}-2", "--", "sleep", "600")
    assert cli.ok("cancel", prefix).strip() == f"{prefix}-2"
    cli.cluster.wait(JobId(f"{prefix}-2"), timeout=60)
    both = cli.run("status", prefix)
    assert both.returncode == 4
    assert "2 jobs begin with" in both.stderr


def test_last_is_the_newest_job(cli: Cli) -> None:  # noqa: F811
    cli.ok("--namespace", "other", "submit", "--wait", "--", "true")
    newest = cli.ok("--namespace", "other", "submit", "--wait", "--", "true").strip()
    assert cli.json("--namespace", "other", "status", "last")["job_id"] == newest


def test_a_command_that_is_not_found_is_told_once(cli: Cli) -> None:  # noqa: F811
    done = cli.run("submit", "--name", "absent", "--wait", "--", "no-such-program")
    assert done.returncode == 1
    assert done.stderr.count("no-such-program") == 1
    assert done.stderr.count("PATH is") == 1


def test_an_id_that_is_misspelled_is_told_with_those_like_it(cli: Cli) -> None:  # noqa: F811
    job_id = cli.ok("submit", "--name", "preprocess", "--wait", "--", "true").strip()
    for misspelled in ("preproces-", "perprocess", job_id.replace("e", "", 1)):
        for command in ("status", "cancel"):
            done = cli.run(command, misspelled)
            assert done.returncode == 4, (command, misspelled)
            assert done.stderr.rstrip().endswith(f"did you mean {job_id!r}?"), done.stderr
    assert "did you mean" not in cli.run("status", "nothing-like-it").stderr


def test_a_worker_that_is_misspelled_is_told_with_those_like_it(cli: Cli) -> None:  # noqa: F811
    worker_id = cli.json("workers")[0]["info"]["worker_id"]
    misspelled = worker_id.replace("o", "", 1)
    for verb in ("health", "drain"):
        done = cli.run("worker", verb, misspelled)
        assert done.returncode == 4, done.stderr
        assert f"did you mean {worker_id!r}" in done.stderr
