"""Records of a log know the job, the actor and the call that they come from."""

from __future__ import annotations

import asyncio
import logging
import logging.config
from collections.abc import Iterator
from typing import Any

import pytest

from fluster import LogContext
from fluster.actors import ActorPool, actor, every
from fluster.testing import LocalActors

FORMAT = "%(job_id)s %(task)s %(attempt)s %(actor)s %(method)s %(message)s"
log = logging.getLogger("test_log_context")


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self) -> list[str]:
        return [self.format(record) for record in self.records]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    monkeypatch.setattr(LogContext, "in_use", False)
    for name, value in (("JOB_ID", "train-1"), ("TASK_INDEX", "2"), ("NUM_TASKS", "4"), ("ATTEMPT", "3")):
        monkeypatch.setenv(f"FLUSTER_{name}", value)
    monkeypatch.setenv("FLUSTER_WORKER_ID", "w1")
    monkeypatch.setenv("FLUSTER_NAMESPACE", "team")
    records = Records()
    log.setLevel(logging.INFO)
    log.addHandler(records)
    yield records
    log.removeHandler(records)
    log.setLevel(logging.NOTSET)


class Writer:
    def write(self, text: str) -> None:
        log.info(text)

    async def write_later(self, text: str) -> None:
        await asyncio.sleep(0)
        log.info(text)

    @every(10)
    def _beat(self) -> None:
        log.info("beat")


@actor(name="json-writer", codec="json", max_concurrency=3)
class JsonWriter(Writer):
    pass


@pytest.mark.parametrize("kind", [Writer, JsonWriter])
def test_records_of_methods_carry_their_call(records: Records, kind: type[Writer]) -> None:
    records.addFilter(LogContext())
    with LocalActors() as actors:
        pool: ActorPool[Any] = actors.deploy(kind, name="writer")
        pool.call().write("one")
        pool.call().write_later("two")
        actors.clock.advance(10)
        log.info("outside")
    assert records.lines() == [
        "train-1 2 3 writer write one",
        "train-1 2 3 writer write_later two",
        "train-1 2 3 writer every-_beat beat",
        "train-1 2 3 - - outside",
    ]
    ids = [record.call_id for record in records.records]
    assert len({*ids[:2]} - {"-"}) == 2
    assert ids[2:] == ["-", "-"]


def test_calls_that_run_side_by_side_are_told_apart(records: Records) -> None:
    records.addFilter(LogContext())
    with LocalActors() as actors:
        pool = actors.deploy(JsonWriter)
        for future in [pool.submit().write_later(str(number)) for number in range(50)]:
            future.result()
    assert len({record.call_id for record in records.records}) == 50


def test_a_configuration_names_the_filter(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUSTER_JOB_ID")
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"fluster": {"()": "fluster.LogContext"}},
            "handlers": {"null": {"class": "logging.NullHandler", "filters": ["fluster"]}},
        }
    )
    assert LogContext.in_use
    records.addFilter(LogContext())
    log.info("plain")
    assert records.lines() == ["- - - - - plain"]
