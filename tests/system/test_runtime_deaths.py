"""Deaths around a task: of its keeper, its template, its worker, its cluster's owner; and what a restarted worker finds."""

import errno
import os
import signal
import socket
import threading
import uuid
from pathlib import Path

import anyio
import psutil
import pytest

from fluster_services.worker.keeper.template import TemplateDiedError, start_template
from fluster_services.worker.runtimes import process_task
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime
from tests.system.runtime_site import PATIENCE_S, Site, Templates, end_of, marked, read_all, texts, wait_for_line
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


async def test_a_killed_keeper_takes_its_task_along(any_site: Site) -> None:
    task = await any_site.command("sh", "-c", "sleep 1000 & setsid sleep 1000 & echo ready; wait", env={"A": "1"})
    await wait_for_line(task, "ready")
    assert task.pid is not None
    keeper = psutil.Process(task.pid).parent()
    assert keeper is not None
    keeper.kill()
    record = await end_of(task)
    assert (record.reason, record.exit_code, record.signal) == ("keeper_died", None, None)
    assert record.error is not None
    assert "the keeper of this attempt died" in record.error.message
    assert texts(task) == ["ready"]
    await any_site.wait_all_gone()


async def test_a_dead_template_is_named_with_the_remedy(tmp_path: Path, templates: Templates) -> None:
    mark = uuid.uuid4().hex
    template = templates.start(mark)
    site = Site(tmp_path, mark, template, ProcessRuntime(tmp_path, template))
    task = await site.command("sleep", "1000")
    psutil.Process(template.pid).kill()
    for number in range(2):
        with pytest.raises(TemplateDiedError, match="restart the worker"):
            await site.command("true", key=f"ns.job.{number}.2")
    task.kill(0, "over")
    assert (await end_of(task)).reason == "killed"
    await task.forget()
    await site.runtime.close()
    assert site.entries() == ["lock"]


async def test_with_the_owner_gone_everything_is(tmp_path: Path, templates: Templates) -> None:
    mark = uuid.uuid4().hex
    read_end, write_end = os.pipe()
    template = templates.start(mark, read_end)
    site = Site(tmp_path, mark, template, ProcessRuntime(tmp_path, template))
    running = await site.command("sh", "-c", "trap '' TERM; setsid sleep 1000 & echo ready; wait; wait")
    await wait_for_line(running, "ready")
    over = await site.command("true", key="ns.job.1.1")
    await end_of(over)
    os.close(write_end)
    assert (await end_of(running)).reason in ("owner_gone", "keeper_died")
    await wait_until_async(lambda: not marked(mark), PATIENCE_S, lambda: marked(mark))
    assert site.entries() == ["lock"]
    await site.runtime.close()
    os.close(read_end)


# Restarts of the worker


async def test_a_restarted_worker_adopts_what_runs(site: Site, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = f"echo one >> {tmp_path}/runs; seq 1000; cat {gate}; seq 1001 2000; exit 3"
    worker = await site.start_worker(script)
    await worker.kill()
    await wait_until_async(lambda: "fluster-templ" not in [each.name() for each in site.processes()], PATIENCE_S)

    task = await site.adopt()
    assert (task.spec, task.pid) == (worker.spec, worker.task_pid)
    assert psutil.pid_exists(worker.task_pid)
    await wait_for_line(task, "1000")
    before, offset = task.read_log()
    await anyio.to_thread.run_sync(gate.write_text, "")
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (3, "exited")
    lines = [*(record for run in before for record in run.records()), *read_all(task, offset)]
    assert [each.text for each in lines] == [str(number) for number in range(1, 2001)]
    assert (tmp_path / "runs").read_text() == "one\n"


async def test_a_restarted_worker_hears_what_ended_meanwhile(any_site: Site) -> None:
    worker = await any_site.start_worker("echo done; sleep 0.2; exit 4", keep_s=0)
    await worker.kill()
    await wait_until_async(lambda: not any_site.processes(), PATIENCE_S)  # its keeper is gone, too
    task = await any_site.adopt()
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (4, "exited")
    assert texts(task) == ["done"]


async def test_a_restarted_worker_hears_it_from_the_keeper_that_waits(any_site: Site) -> None:
    worker = await any_site.start_worker("exit 4")
    await worker.kill()
    task = await any_site.adopt()
    assert (await end_of(task)).exit_code == 4


async def test_a_restarted_worker_finds_the_keeper_dead(any_site: Site) -> None:
    worker = await any_site.start_worker("setsid sleep 1000 & echo ready; wait")
    keeper = psutil.Process(worker.task_pid).parent()
    assert keeper is not None
    await worker.kill()
    keeper.kill()
    task = await any_site.adopt()
    assert (await end_of(task)).reason == "keeper_died"
    await wait_until_async(lambda: "fluster-templ" not in [each.name() for each in any_site.processes()], PATIENCE_S)
    await any_site.wait_all_gone()


async def test_with_worker_and_keeper_dead_nothing_is_left_of_the_task(site: Site) -> None:
    worker = await site.start_worker("sleep 1000 & setsid sleep 1000 & echo ready; wait")
    keeper = psutil.Process(worker.task_pid).parent()
    assert keeper is not None
    await worker.kill()
    keeper.kill()
    await site.wait_all_gone()  # and this is what another worker finds much later
    task = await site.adopt()
    assert (await end_of(task)).reason == "keeper_died"


async def test_with_the_worker_dead_a_stopped_keeper_does_not_keep_the_fence_from_falling(any_site: Site) -> None:
    worker = await any_site.start_worker("sleep 1000 & sleep 1000", fence_after_s=4.0, kill_grace_s=0.5)
    task_process = psutil.Process(worker.task_pid)
    keeper = task_process.parent()
    assert keeper is not None
    keeper.suspend()
    await worker.kill()
    await wait_until_async(lambda: _is_over(task_process), PATIENCE_S)
    keeper.resume()
    task = await any_site.adopt()
    assert (await end_of(task)).reason == "fenced"


async def test_a_template_leaves_what_another_worker_has_taken_over(site: Site) -> None:
    worker = await site.start_worker("sleep 1000", fence_after_s=20.0, kill_grace_s=0.5)
    await worker.kill()
    task = await site.adopt()
    task.renew(3600)
    await wait_until_async(lambda: "fluster-watch" not in [each.name() for each in site.processes()], PATIENCE_S)
    assert psutil.pid_exists(worker.task_pid)
    task.kill(0, "over")
    assert (await end_of(task)).reason == "killed"


def _is_over(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_killed_worker_does_not_keep_the_fence_from_falling(any_site: Site) -> None:
    worker = await any_site.start_worker("sleep 1000", fence_after_s=0.5)
    await worker.kill()
    task = await any_site.adopt()
    assert (await end_of(task)).reason == "fenced"


async def test_a_stopped_worker_does_not_keep_the_fence_from_falling(any_site: Site) -> None:
    worker = await any_site.start_worker("sleep 1000", fence_after_s=0.5)
    worker.process.send_signal(signal.SIGSTOP)
    await wait_until_async(lambda: not psutil.pid_exists(worker.task_pid), PATIENCE_S)
    await worker.kill()
    task = await any_site.adopt()
    assert (await end_of(task)).reason == "fenced"


async def test_what_was_being_prepared_was_never_started(site: Site, tmp_path: Path) -> None:
    await site.runtime.close()
    draft = site.state_dir / "0123456789abcdef.00000000.new"
    draft.mkdir()
    (draft / "spec.json").write_text("{}")
    site.runtime = ProcessRuntime(site.state_dir, site.template)
    assert await site.runtime.adopt() == []
    assert not draft.exists()


async def test_a_closed_runtime_leaves_its_tasks_alone(any_site: Site) -> None:
    first = await any_site.command("sleep", "1000")
    await any_site.runtime.close()
    assert [event async for event in first.events()] == []
    with pytest.raises(RuntimeError, match="is closed"):
        await any_site.command("true", key="ns.job.1.1")
    task = await any_site.adopt()
    assert task.pid == first.pid
    assert task.spec == first.spec
    assert first.pid is not None
    assert psutil.pid_exists(first.pid)


async def test_a_template_is_refused_once_threads_run() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="too-early")
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"before any thread.*'too-early'"):
            start_template()
    finally:
        gate.set()
        thread.join()


async def test_an_attempt_whose_keeper_cannot_be_reached_for_want_of_descriptors_is_not_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = process_task._connect  # noqa: SLF001 - a keeper that cannot be reached, at will
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))] * 2

    def connect(directory: Path) -> socket.socket | None:
        if failures:
            raise failures.pop()
        return reach(directory)

    monkeypatch.setattr(process_task, "_connect", connect)
    monkeypatch.setattr(process_task, "_RESOURCES_PAUSE_S", 0.0)
    record = await end_of(await site.command("true"))
    assert (record.exit_code, failures) == (0, [])
