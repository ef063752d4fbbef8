from fluster import LocalCluster, ResourceConfig, WorkerPool, actor, deploy


@actor
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


def square(number: int) -> int:
    return number * number


if __name__ == "__main__":
    with LocalCluster() as cluster:
        counters = deploy(cluster, Counter, 100, replicas=2)
        print(counters.call().add(1))  # one member, in turn: 101
        print(counters.submit().add(1).result())  # a future
        print(counters.broadcast().add(10).results())  # every member

        with WorkerPool(cluster, num_workers=2, resources=ResourceConfig.with_cpu(1)) as pool:
            print([future.result() for future in pool.map(square, range(5))])
