"""Actors that take JSON only, in processes of their own on a cluster."""

from __future__ import annotations

from pydantic import BaseModel

from fluster import LocalCluster, actor, deploy
from fluster_bus import subjects
from fluster_bus.names import unique_name


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
        assert pool.broadcast().move(Point(x=1)).results(timeout=30) == [{"x": 3, "y": 0}] * 2
        subject = subjects.actor_any(cluster.namespace, name, "move")
        answer = cluster.portal.run(cluster.asynchronous.bus.request, subject, b'[{"x": "5"}]')
        assert answer.data == b'{"result": {"x": 7, "y": 0}}'
    finally:
        pool.shutdown()
