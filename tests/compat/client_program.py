"""A client that does each kind of work once, and says what came of it; run by the release that PYTHONPATH names."""

import json
import sys

import fluster
from fluster import Cluster, Entrypoint, EnvironmentConfig, JobRequest, ResourceConfig, WorkerPool, actor, deploy

SMALL = ResourceConfig.with_cpu(1, memory="128MiB")


@actor
class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def where() -> str:
    """The release that the task itself has."""
    return str(fluster.__file__)


def square(number: int) -> int:
    return number * number


def quotient(number: int) -> int:
    """Fails for one, whose neighbours have travelled with it."""
    return 840 // number


def main() -> None:
    with Cluster() as cluster:
        command = Entrypoint(command=("sh", "-c", "echo said"))
        printed = cluster.launch(JobRequest(name="printed", entrypoint=command, resources=SMALL))
        called = cluster.launch(
            JobRequest(name="called", entrypoint=Entrypoint(callable=where, args=()), resources=SMALL)
        )
        environment = EnvironmentConfig(env_vars={"LARGE": "x" * 100_000})  # the queue takes no such request itself
        large = cluster.launch(JobRequest(name="large", entrypoint=command, resources=SMALL, environment=environment))
        ended = cluster.wait(printed, timeout=60)
        counters = deploy(cluster, Counter, 100, resources=SMALL)
        counted = [counters.call().add(1), counters.submit().add(1).result(60), *counters.broadcast().add(10).results()]
        with WorkerPool(cluster, num_workers=2, resources=SMALL) as pool:
            squares = pool.map(square, range(200)).results()
            one = pool.submit(square, 12).result(60)
            quotients = pool.map(quotient, range(1_000)).results(60, return_exceptions=True)
            many = [pool.submit(square, number) for number in range(200)]
            bundled = [future.result(60) for future in many]
        said = {
            "release": fluster.__file__,
            "status": ended.status,
            "large": cluster.wait(large, timeout=60).status,
            "output": [line.text for line in cluster.logs(printed)],
            "task_release": cluster.result(called),
            "counted": counted,
            "squares": sum(squares),
            "one": one,
            "failed": [type(each).__name__ for each in quotients if isinstance(each, Exception)],
            "quotients": sum(each for each in quotients if isinstance(each, int)),
            "bundled": sum(bundled),
        }
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
