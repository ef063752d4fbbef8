"""A keeper whose attempt is over and forgotten gets the next one of its namespace."""

import asyncio
import os

import psutil
import pytest

from fluster_services.worker.contract.attempt_directory import KEEPER_FILE, read_json_lines
from fluster_services.worker.contract.faults import AlreadyStartedError, LaunchError
from fluster_services.worker.runtimes import idle_keepers, process_task
from fluster_services.worker.runtimes.process_task import ProcessTask
from tests.system.runtime_site import Site, end_of, texts, wait_for_line

pytestmark = pytest.mark.anyio


def _keeper_of(task: ProcessTask) -> int:
    known = read_json_lines(task.directory / KEEPER_FILE)["started"]
    return int(known["keeper_pid"])


async def test_the_next_attempt_of_a_namespace_gets_the_keeper_that_is_free(site: Site) -> None:
    keepers = []
    for key in ("ns.job.0.1", "ns.job.1.1", "other.job.0.1", "ns.job.2.1"):
        task = await site.call(print, key, key=key)
        keepers.append(_keeper_of(task))
        assert (await end_of(task)).exit_code == 0
        assert texts(task) == [key]
        await task.forget()
    assert keepers[0] == keepers[1] == keepers[3] != keepers[2]


async def test_a_keeper_that_will_be_free_in_a_moment_is_waited_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_keepers, "_MOMENT_S", 10.0)
    first = await site.command("true")
    keeper = _keeper_of(first)
    await end_of(first)
    starting = asyncio.create_task(site.command("true", key="ns.job.1.1"))
    await asyncio.sleep(0)
    await first.forget()
    assert _keeper_of(await starting) == keeper


async def test_a_keeper_that_is_not_free_soon_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_keepers, "_MOMENT_S", 0.01)
    first = await site.command("true")
    await end_of(first)
    second = await site.command("true", key="ns.job.1.1")
    assert _keeper_of(second) != _keeper_of(first)


async def test_an_attempt_finds_nothing_of_the_one_before(site: Site) -> None:
    first = await site.command("sh", "-c", "echo mess >&2; pwd; echo left > here; exit 3", env={"ONLY": "first"})
    record = await end_of(first)
    assert record.exit_code == 3
    assert "mess" in record.log_tail
    (folder,) = texts(first)
    await first.forget()
    second = await site.command("sh", "-c", "echo $ONLY; ls; pwd", key="ns.job.1.1")
    record = await end_of(second)
    assert (record.exit_code, record.reason) == (0, "exited")
    assert "mess" not in record.log_tail
    assert texts(second)[0] == ""
    assert "here" not in texts(second)
    assert texts(second)[-1] != folder


async def test_what_is_killed_leaves_a_keeper_for_the_next(site: Site) -> None:
    task = await site.command("sh", "-c", "setsid sleep 1000 & echo ready; wait")
    await wait_for_line(task, "ready")
    task.kill(0, "enough")
    assert (await end_of(task)).reason == "killed"
    await task.forget()
    task = await site.command("sleep", "1000", key="ns.job.1.1")
    psutil.Process(_keeper_of(task)).kill()
    assert (await end_of(task)).reason == "keeper_died"


async def test_a_lease_of_the_attempt_before_does_not_end_the_next(site: Site) -> None:
    task = await site.command("true", fence_after_s=0.3, timeout_s=0.3)
    await end_of(task)
    await task.forget()
    task = await site.command("sleep", "1", key="ns.job.1.1")
    assert (await end_of(task)).exit_code == 0


async def test_a_free_keeper_that_dies_is_missed_by_nobody(site: Site) -> None:
    for number in range(3):
        task = await site.command("true", key=f"ns.job.{number}.1")
        keeper = psutil.Process(_keeper_of(task))
        assert (await end_of(task)).exit_code == 0
        await task.forget()
        keeper.kill()


async def test_a_free_keeper_that_does_not_answer_begins_nothing_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_task, "_ASSIGN_TIMEOUT_S", 0.1)
    task = await site.command("true")
    keeper = psutil.Process(_keeper_of(task))
    await end_of(task)
    await task.forget()
    keeper.suspend()
    with pytest.raises(LaunchError, match="did not answer"):
        await site.command("sh", "-c", "echo twice", key="ns.job.1.1")
    keeper.resume()
    keeper.wait(60)  # the last connection to it is closed
    task = await site.command("sh", "-c", "echo once", key="ns.job.1.1")
    await end_of(task)
    assert texts(task) == ["once"]


async def test_a_free_keeper_goes_when_it_is_told_to_and_with_the_runtime(site: Site) -> None:
    for number in range(2):
        task = await site.command("true", key=f"ns.job.{number}.1")
        keeper = psutil.Process(_keeper_of(task))
        await end_of(task)
        await task.forget()
        keeper.terminate()
    task = await site.command("true", key="ns.job.3.1")
    await end_of(task)
    await task.forget()
    await site.runtime.close()
    await site.wait_all_gone()


async def test_a_key_that_is_there_is_refused_by_a_free_keeper_too(site: Site) -> None:
    there, over = await site.command("sleep", "1000"), await site.command("true", key="ns.job.1.1")
    await end_of(over)
    await over.forget()
    for _ in range(2):
        with pytest.raises(AlreadyStartedError):
            await site.command("true")
    os.kill(there.pid or 0, 0)
