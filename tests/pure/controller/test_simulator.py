"""Small clusters in the simulator: whatever befalls them, each job ends once and nothing is given away twice."""

import pytest

from benchmarks.simulator.machines import Machine
from benchmarks.simulator.queue_growth import Backlog
from benchmarks.simulator.simulation import Simulation
from benchmarks.simulator.workload import Workload
from fluster_bus.messages import Capacity, JobRecord, JobStatus, TaskRecord
from fluster_services import capacity, lifecycle
from fluster_services.controller.state.job_index import JobKey


class Checked(Simulation):
    """Looks again after each thing that happens, at the machines that it has changed."""

    def __init__(self, workload: Workload) -> None:
        self._seen: dict[Machine, object] = {}
        super().__init__(workload)

    def write(self, record: JobRecord | TaskRecord) -> None:
        super().write(record)
        running = [attempt for machine in self.fleet.machines for attempt in machine.attempts.values()]
        tasks = [(attempt.job, attempt.record.task) for attempt in running]
        assert len(set(tasks)) == len(tasks), "a task runs twice"
        for machine in self.fleet.machines:
            state = machine.is_up, machine.ledger.free, [*machine.attempts], [*machine.ledger.attempts()]
            if self._seen.get(machine) != state:
                machine.check()
                self._seen[machine] = state

    def on_placed(self, key: JobKey, task: TaskRecord) -> None:
        super().on_placed(key, task)
        entry = self.job_index.get(key)
        assert entry is not None
        assert entry.job is not None
        assert all(each.is_over for each in self.job_index.dependencies(key).values()), (
            "it runs before another has ended"
        )
        if task.gang:
            assert entry.job.value.is_go
            assert all(lifecycle.is_held(each) for each in entry.task_records()), (
                "a gang starts without one of its tasks"
            )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("load", "swing"), [(0.6, 0.0), (1.3, 0.3)])
def test_each_job_ends_once_and_no_machine_gives_away_more_than_it_has(seed: int, load: float, swing: float) -> None:
    workload = Workload(
        workers=4,
        jobs=150,
        load=load,
        swing=swing,
        failing=0.1,
        gangs=0.1,
        days_between_losses=0.3,
        repair_s=600.0,
        seed=seed,
    )
    simulation = Checked(workload)
    simulation.run()
    simulation.check()
    figures = simulation.figures
    assert sum(figures.ended.values()) == workload.jobs
    assert figures.ended[JobStatus.SUCCEEDED] > workload.jobs / 2
    assert figures.lost_workers
    assert figures.retried
    assert figures.released
    assert figures.gangs_started
    assert len(simulation.dispatch.scheduler) == len(simulation.gathering) == 0
    assert simulation.job_index.keys() == []
    assert all(not machine.attempts for machine in simulation.fleet.machines)
    assert load / 3 < figures.utilisation <= 1


def test_the_same_seed_gives_the_same_history() -> None:
    def history() -> list[float]:
        simulation = Simulation(Workload(workers=3, jobs=50, load=1.0))
        simulation.run()
        return [*simulation.figures.placement_s, *simulation.figures.gang_placement_s, simulation.clock.now]

    assert history() == history()


def test_a_cluster_with_room_places_at_once_and_one_with_too_little_is_full() -> None:
    idle = Simulation(Workload(workers=30, jobs=300, load=0.3))
    idle.run()
    assert sorted(idle.figures.placement_s)[270] < 0.1
    busy = Simulation(Workload(workers=10, jobs=1_000, load=1.5))
    busy.run()
    assert busy.figures.utilisation > 0.8


def test_a_simulated_worker_listens_on_the_classes_that_a_real_one_covers() -> None:
    simulation = Simulation(Workload(workers=1, jobs=1, load=1.0))
    (machine,) = simulation.fleet.machines
    listeners = simulation.fleet.listeners
    for cpu, gpus in ((0, 0), (1, 1), (3, 0), (12, 8), (20, 5)):
        need = Capacity(cpu=cpu, memory=5 * cpu << 30, device="gpu", variant="h100", devices=gpus)
        assert machine.ledger.reserve(f"attempt-{cpu}", need)
        listeners.cover(machine)
        covered = capacity.classes_covered(machine.ledger.free)
        assert listeners.listened(machine) == listeners.classes() & covered
        assert (listeners.listened(machine) < listeners.classes()) == (cpu > 16 or gpus > 4)
        machine.ledger.release(f"attempt-{cpu}")


def test_a_backlog_stays_as_long_as_it_is() -> None:
    backlog = Backlog(20)
    for _ in range(50):
        backlog.pass_one_through()
    assert len(backlog.scheduler) == 20
