"""Actors that take JSON only, in processes of their own on a cluster."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from fluster import LocalCluster, actor, deploy
from fluster_bus.core import subjects
from fluster_bus.core.names import unique_name
from tests.system.test_cli import Cli
from tests.waiting import wait_until


class Point(BaseModel):
    x: int
    y: int = 0


@actor(codec="json")
class Shapes:
    def __init__(self, step: int) -> None:
        self.step = step

    def move(self, point: Point) -> Point:
        return Point(x=point.x + self.step, y=point.y)


def test_a_class_that_takes_json_only_is_deployed_and_called_by_both(cluster: LocalCluster) -> None:
    name = unique_name("shapes")
    pool = deploy(cluster, Shapes, 2, name=name, replicas=2)
    try:
        assert [pool.submit().move({"x": number}).result() for number in range(4)] == [
            {"x": number + 2, "y": 0} for number in range(4)
        ]
        assert pool.broadcast().move(Point(x=1)).results(timeout=60) == [{"x": 3, "y": 0}] * 2
        subject = subjects.actor_any(cluster.namespace, name, "move")
        answer = cluster.portal.run(cluster.asynchronous.bus.request, subject, b'[{"x": "5"}]')
        assert answer.data == b'{"result": {"x": 7, "y": 0}}'
    finally:
        pool.shutdown()


class Stuck:
    def hold(self, path: str) -> NoReturn:
        """Say which process is to be killed."""
        Path(path).write_text(f"{os.getpid()}")
        while True:
            signal.pause()


def test_the_command_that_calls_an_actor_is_told_that_it_died(cluster: LocalCluster, tmp_path: Path) -> None:
    name, told = unique_name("stuck"), tmp_path / "pid"
    with deploy(cluster, Stuck, name=name):
        command = Cli(cluster).start("call", name, "hold", json.dumps(str(told)), "--timeout", "600")
        try:
            pid = wait_until(lambda: told.exists() and told.read_text(), describe=command.poll)
            os.kill(int(pid), signal.SIGKILL)
            output, errors = command.communicate(timeout=60)  # a tenth of its time-out
        finally:
            command.kill()
            command.wait()
    assert (command.returncode, output) == (1, "")
    assert f"fluster: {name}.hold: the actor " in errors
    assert "ended (killed by SIGKILL) while the call was out; it may have run" in errors
