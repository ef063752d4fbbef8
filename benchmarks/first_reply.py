"""A cluster, an actor, and its first reply, as in a user's script; then more actors: `python -m benchmarks.first_reply`."""

from __future__ import annotations

from benchmarks.actor_work import ACTORS, ALL_THERE, PAYLOAD, REPLIED, say, wait_until_measured
from fluster import LocalCluster, actor, deploy


@actor
class Echo:
    def echo(self, data: bytes) -> bytes:
        return data


if __name__ == "__main__":
    with LocalCluster() as cluster:
        deploy(cluster, Echo).call().echo(PAYLOAD)
        say(REPLIED)
        deploy(cluster, Echo, name="more", replicas=ACTORS - 1).broadcast().echo(PAYLOAD).results()
        say(ALL_THERE)
        wait_until_measured()
