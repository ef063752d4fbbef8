"""What notebooks show: whatever a user wrote into a name or an error stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from fluster.cluster import Cluster
from fluster.testing import LocalActors
from fluster.worker_pool import PoolStatus
from fluster.worker_pool.progress import pool_view
from fluster_bus.messages import JobId, JobInfo, JobStatus, Namespace, TaskStatus, WorkerId
from fluster_bus.messages.jobs import Progress
from fluster_bus.messages.notebook import bar, table, view

EVIL = "<script>alert('&')</script>\" onload=\"x"


class _Tags(HTMLParser):
    """The tags, which must be closed in order, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(html: str) -> list[str]:
    """The texts of a view, which has no tags and attributes but our own."""
    tags = _Tags(html)
    assert set(tags.tags) <= {"div", "strong", "table", "thead", "tbody", "tr", "th", "td", "span", "progress"}
    assert tags.attributes <= {"style", "value", "max"}
    return tags.text


def test_all_text_is_escaped() -> None:
    texts = checked(
        view(EVIL, {EVIL: EVIL, "none": None, "empty": "", "zero": 0}, table([EVIL], [[EVIL]]), bar(1, 2, EVIL))
    )
    assert [text.strip() for text in texts] == [EVIL, EVIL, EVIL, "zero", "0", EVIL, EVIL, EVIL]


def test_a_table_is_cut() -> None:
    texts = checked(table(["number"], [[number] for number in range(25)]))
    assert texts[1:] == [*map(str, range(20)), "… and 5 more"]
    assert table(["number"], []) == ""


def test_a_bar_without_an_end() -> None:
    assert "value" not in bar(3, None, "3")
    assert 'value="0" max="1e-09"' in bar(0, 0, "none")


def job(**changes: object) -> JobInfo:
    facts = {
        "job_id": JobId("train-1"),
        "name": "train",
        "namespace": Namespace("default"),
        "status": JobStatus.RUNNING,
        "submitted_at": 1e9,
        "started_at": 1e9,
    }
    return JobInfo.model_validate(facts | changes)


def task(number: int, status: JobStatus, **more: object) -> TaskStatus:
    return TaskStatus.model_validate({"task": number, "status": status, "attempt": 1, **more})


def test_a_job_and_its_tasks() -> None:
    told = Progress(fraction=0.5, message=EVIL)
    tasks = (
        task(0, JobStatus.RUNNING, worker_id=WorkerId("w1"), progress=told),
        task(1, JobStatus.FAILED, exit_code=3, error_message=EVIL, started_at=1e9, finished_at=1e9 + 2.5),
    )
    texts = checked(job(tasks=tasks, error_message=EVIL)._repr_html_())
    assert texts[0] == "Job train-1"
    assert {"2001-09-09 01:46:40 UTC", "w1", "3", "2.5 s", f"25% {EVIL}"} <= {text.strip() for text in texts}
    assert texts.count(EVIL) == 2


def test_a_job_that_waits() -> None:
    html = job(status=JobStatus.PENDING, submitted_at=None, started_at=None)._repr_html_()
    assert "progress" not in html
    assert checked(html)[1:3] == ["status", "PENDING"]


def test_a_pool() -> None:
    status = PoolStatus(workers=1, wanted=2, queued=3, out=4, done=5_000, failed=6)
    texts = [text.strip() for text in checked(pool_view("WorkerPool w", status, EVIL))]
    assert texts[0] == "WorkerPool w"
    assert texts[-1] == "5,006 of 5,013 tasks"
    assert {EVIL, "1 of 2", "6"} <= set(texts)
    assert "progress" not in pool_view("w", PoolStatus(1, 1, 0, 0, 0, 0))
    assert checked(pool_view("w", None, "closed")) == ["w", "state", "closed"]


def test_actors_in_memory_are_shown_too() -> None:
    class Counter:
        def add(self) -> None:
            pass

    with LocalActors() as actors:
        pool = actors.deploy(Counter, name="counter")
        assert "memory" in repr(actors.cluster)
        assert "memory" in checked(actors.cluster._repr_html_())
        assert {"ActorPool counter", "ready"} <= set(checked(pool._repr_html_()))
    assert "closed" in " ".join(checked(pool._repr_html_()))
    assert repr(actors.cluster).endswith("closed)")


def test_a_cluster_that_never_was_can_be_shown() -> None:
    assert repr(Cluster.__new__(Cluster)) == "<Cluster that is not connected>"


@pytest.mark.parametrize("kind", ["progress", "span"])
def test_the_checks_see_what_is_there(kind: str) -> None:
    assert re.search(
        f"<{kind}", job(tasks=(task(0, JobStatus.RUNNING, progress=Progress(fraction=0.1)),))._repr_html_()
    )
