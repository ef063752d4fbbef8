"""Small clusters in the simulator: whatever befalls them, each job ends once and nothing is given away twice."""

import pytest

from benchmarks.simulator.machines import QueueGroups
from benchmarks.simulator.queue_growth import Backlog
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload
from fluster_bus.messages import Capacity, JobStatus
from fluster_services import capacity
from fluster_services.controller.books import JobKey


class Checked(Simulation):
    """Looks again after each thing that happens."""

    def _settle(self, key: JobKey) -> None:
        super()._settle(key)
        for machine in self.machines:
            machine.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("load", "swing"), [(0.6, 0.0), (1.3, 0.3)])
def test_each_job_ends_once_and_no_machine_gives_away_more_than_it_has(seed: int, load: float, swing: float) -> None:
    workload = Workload(
        workers=4, jobs=150, load=load, swing=swing, failing=0.1, days_between_losses=0.3, repair_s=600.0, seed=seed
    )
    simulation = Checked(workload)
    simulation.run()
    simulation.check()
    assert sum(simulation.ended.values()) == workload.jobs
    assert simulation.ended[JobStatus.SUCCEEDED] > workload.jobs / 2
    assert simulation.lost_workers
    assert simulation.retried
    assert len(simulation.scheduler) == 0
    assert simulation.books.keys() == []
    assert all(not machine.attempts for machine in simulation.machines)
    assert 0 < simulation.utilisation <= 1


def test_the_same_seed_gives_the_same_history() -> None:
    def history() -> list[float]:
        simulation = Simulation(Workload(workers=3, jobs=50, load=1.0))
        simulation.run()
        return [*simulation.placement_s, simulation.clock.now]

    assert history() == history()


def test_a_cluster_with_room_places_at_once() -> None:
    simulation = Simulation(Workload(workers=20, jobs=200, load=0.3))
    simulation.run()
    assert sorted(simulation.placement_s)[180] < 0.1


def test_a_simulated_worker_listens_on_the_classes_that_a_real_one_covers() -> None:
    simulation = Simulation(Workload(workers=1, jobs=1, load=1.0))
    (machine,) = simulation.machines
    groups: QueueGroups = simulation._groups
    for cpu in (0, 1, 3, 12, 20):
        if cpu:
            assert machine.ledger.reserve(f"attempt-{cpu}", Capacity(cpu=cpu, memory=5 * cpu << 30))
        groups.cover(machine)
        listened = {each for each, members in groups._members.items() if machine in members}
        assert listened == {each for each in groups._classes if each in capacity.classes_covered(machine.ledger.free)}
        machine.ledger.release(f"attempt-{cpu}")


def test_a_backlog_stays_as_long_as_it_is() -> None:
    backlog = Backlog(20)
    for _ in range(50):
        backlog.pass_one_through()
    assert len(backlog._scheduler) == 20
