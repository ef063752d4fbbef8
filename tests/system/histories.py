"""What the event stream says about jobs."""

from __future__ import annotations

from collections import defaultdict

from fluster.cluster import Cluster
from fluster_bus.core import buckets, subjects
from fluster_bus.messages import Event, JobInfo, JobStatus
from fluster_bus.storage.feeds import Feed
from tests.waiting import wait_until


def events(cluster: Cluster) -> dict[str, list[Event]]:
    """The event stream, by record, in the order of the stream."""
    bus, namespace = cluster.asynchronous.bus, cluster.namespace

    async def read() -> dict[str, list[Event]]:
        stream = buckets.events_stream(namespace)
        feed = Feed(bus, stream, subject=subjects.events_of_all(namespace), watch=subjects.watch_events(namespace))
        found: dict[str, list[Event]] = defaultdict(list)
        async for entry in feed.stored():
            event = Event.from_json(entry.data)
            found[event.job_id if event.task is None else buckets.task_key(event.job_id, event.task)].append(event)
        return found

    return cluster.portal.run(read)


def check_history(cluster: Cluster, infos: list[JobInfo]) -> dict[str, list[Event]]:
    """Each record's transitions are in the stream, each once and in order, and only the last is an end."""

    def complete() -> dict[str, list[Event]] | None:
        found = events(cluster)
        ended = all(found[info.job_id] and found[info.job_id][-1].transition.state.finished() for info in infos)
        return found if ended else None

    found = wait_until(complete)
    assert found is not None
    for key, story in found.items():
        numbers = [event.transition.number for event in story]
        assert numbers == list(range(1, len(story) + 1)), f"{key}: {numbers}"
    for info in infos:
        states = [event.transition.state for event in found[info.job_id]]
        assert states == [JobStatus.PENDING, info.status], info.job_id
        for task in info.tasks:
            story = found[buckets.task_key(info.job_id, task.task)]
            assert story[-1].transition.state is task.status
            ends = [event.transition for event in story if event.transition.state.finished()]
            assert [end.attempt for end in ends] == list(range(1, task.attempt + 1)), story
    return found
