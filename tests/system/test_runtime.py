"""The process runtime with real processes and signals."""

import base64
import gc
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import cloudpickle
import psutil
import pytest

from fluster.errors import RemoteError
from fluster_bus.running.fence_clock import fence_clock
from fluster_services.worker.contract.faults import AlreadyStartedError, LaunchError
from fluster_services.worker.keeper.template import TemplateHandle
from fluster_services.worker.linux.cgroups import Enforcer
from fluster_services.worker.linux.limits import CgroupController, Limits
from fluster_services.worker.runtimes.process_runtime import ProcessRuntime
from tests.system.runtime_site import (
    PATIENCE_S,
    Site,
    end_of,
    peak_memory_kib,
    read_all,
    texts,
    wait_for_line,
)
from tests.waiting import wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def _pickled_by_value() -> Iterator[None]:
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


# Callables


def say(*lines: str) -> None:
    for line in lines:
        print(line)


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is odd")


async def test_a_callable_runs_and_its_output_is_there_when_its_end_is_told(any_site: Site) -> None:
    task = await any_site.call(say, "one", "two")
    record = await end_of(task)
    assert (record.exit_code, record.signal, record.reason, record.error) == (0, None, "exited", None)
    assert record.started_at is not None
    assert record.finished_at is not None
    assert record.started_at <= record.finished_at
    assert texts(task) == ["one", "two"]
    assert task.read_log()[1] == record.log_end


async def test_an_exception_is_printed_and_can_be_raised_again(any_site: Site) -> None:
    def fail() -> None:
        raise ValueError("no such luck")

    task = await any_site.call(fail)
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (1, "exited")
    assert record.error is not None
    assert (record.error.type, record.error.message) == ("ValueError", "no such luck")
    assert "in fail\n" in record.error.traceback
    assert "task_process.py" not in record.error.traceback
    assert record.log_tail[-1] == "ValueError: no such luck"
    assert texts(task, "stderr") == record.log_tail
    assert record.error.pickled is not None
    assert isinstance(pickle.loads(base64.b64decode(record.error.pickled)), ValueError)


async def test_an_exception_that_cannot_be_made_again_comes_as_one_of_its_class_with_the_text(any_site: Site) -> None:
    def fail() -> None:
        raise OddError(1, 2)

    record = await end_of(await any_site.call(fail))
    assert record.error is not None
    assert record.error.message == "1 is odd"
    assert record.error.pickled is not None
    restored = pickle.loads(base64.b64decode(record.error.pickled))
    assert isinstance(restored, OddError)
    assert isinstance(restored, RemoteError)


@pytest.mark.parametrize(
    ("argument", "exit_code", "stderr"), [(3, 3, []), (None, 0, []), ("good bye", 1, ["good bye"]), (-2, 254, [])]
)
async def test_sys_exit_means_what_it_means_in_a_program(
    any_site: Site, argument: object, exit_code: int, stderr: list[str]
) -> None:
    task = await any_site.call(sys.exit, argument)
    record = await end_of(task)
    assert (record.exit_code, record.error) == (exit_code, None)
    assert texts(task, "stderr") == stderr


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM, signal.SIGINT])
async def test_death_by_signal_is_told_as_such(any_site: Site, number: signal.Signals) -> None:
    def die(number: int) -> None:
        print("before")
        os.kill(os.getpid(), number)

    task = await any_site.call(die, int(number))
    record = await end_of(task)
    assert (record.exit_code, record.signal, record.reason) == (None, number, "exited")
    assert texts(task) == ["before"]


async def test_a_callable_finds_a_fresh_process(site: Site, tmp_path: Path) -> None:
    def look() -> None:
        main = sys.modules["__main__"]
        print([name for name in vars(main) if not name.startswith("__")])
        print(sys.argv)
        print(Path.cwd())
        print(os.environ["GIVEN"], os.environ.get("PYTEST_CURRENT_TEST"), "HOME" in os.environ)
        print(sys.path[0])
        print(sys.stdin.read() == "")
        print(sorted(fd for path in Path("/proc/self/fd").iterdir() if (fd := int(path.name)) > 2)[1:])
        print([number for number in signal.valid_signals() if signal.getsignal(number) not in (None, signal.SIG_DFL)])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        print(threading.current_thread() is threading.main_thread(), os.getsid(0) == os.getpid())
        print(oct(os.umask(0)), gc.isenabled())

    task = await site.call(look, env={"GIVEN": "yes"}, working_dir=str(tmp_path), python_path=["/somewhere"])
    assert (await end_of(task)).exit_code == 0
    umask = os.umask(0o022)
    os.umask(umask)
    assert texts(task) == [
        "[]",
        "['fluster-task']",
        str(tmp_path),
        "yes None True",
        "/somewhere",
        "True",
        "[]",
        str([signal.SIGINT, signal.SIGPIPE]),
        "set()",
        "True True",
        f"{oct(umask)} True",
    ]


async def test_random_numbers_differ_from_task_to_task(any_site: Site) -> None:
    def draw() -> None:
        import random

        print(random.random())

    tasks = [await any_site.call(draw, key=f"ns.job.{index}.1") for index in range(3)]
    for task in tasks:
        await end_of(task)
    assert len({texts(task)[0] for task in tasks}) == 3


async def test_threads_are_waited_for_and_exit_handlers_run(any_site: Site) -> None:
    def leave_a_thread() -> None:
        import atexit

        gate = threading.Event()
        atexit.register(print, "handler")

        def finish() -> None:
            gate.wait()
            print("thread")

        threading.Thread(target=finish).start()
        print("main")
        gate.set()

    task = await any_site.call(leave_a_thread)
    assert (await end_of(task)).exit_code == 0
    assert sorted(texts(task)) == ["handler", "main", "thread"]
    assert texts(task)[-1] == "handler"


async def test_a_payload_that_cannot_be_unpickled_fails_like_the_callable(any_site: Site) -> None:
    task = await any_site.runtime.start(any_site.spec(), b"nonsense")
    record = await end_of(task)
    assert record.exit_code == 1
    assert record.error is not None
    assert record.error.type == "_pickle.UnpicklingError"


# Commands


async def test_a_command_gets_its_environment_and_nothing_of_the_workers_python(site: Site, tmp_path: Path) -> None:
    look = "os.environ['GIVEN'], os.getcwd(), 'PYTHONPATH' in os.environ, sys.stdin.read() == ''"
    program = f"import os, sys; print({look})"
    task = await site.command(
        sys.executable, "-c", program, env={"GIVEN": "yes"}, working_dir=str(tmp_path), python_path=["/somewhere"]
    )
    assert (await end_of(task)).exit_code == 0
    assert texts(task) == [f"yes {tmp_path} False True"]


LOOK = """
import ctypes, os, signal, sys
print(sys.argv[1:], os.getcwd(), sys.stdin.read() == "", oct(os.umask(0)))
ignored = [int(number) for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
print(ignored, signal.pthread_sigmask(signal.SIG_BLOCK, ()), os.getsid(0) == os.getpid())
print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[3:-1])
dies_with_parent = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_with_parent))  # PR_GET_PDEATHSIG
print(dies_with_parent.value)
"""


@pytest.mark.parametrize("is_script", [False, True], ids=["program, spawned", "script, forked and executed"])
async def test_a_command_finds_a_fresh_process(site: Site, tmp_path: Path, *, is_script: bool) -> None:
    script = tmp_path / "look"
    script.write_text(f"#!{sys.executable}\n{LOOK}")
    script.chmod(0o700)
    command = [str(script)] if is_script else [sys.executable, str(script)]
    umask = os.umask(0o022)
    os.umask(umask)
    task = await site.command(*command, "one two", working_dir=str(tmp_path))
    assert (await end_of(task)).exit_code == 0
    assert texts(task) == [
        f"['one two'] {tmp_path} True {oct(umask)}",
        f"{[int(signal.SIGPIPE), int(signal.SIGXFSZ)]} set() True",  # which the interpreter itself ignores
        "[]",
        str(int(signal.SIGKILL)),
    ]


async def test_a_script_whose_interpreter_is_missing_says_so(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o700)
    record = await end_of(await site.command(str(script)))
    assert record.exit_code == 127
    assert record.error is not None
    assert "is there, but the interpreter that its first line names is not" in record.error.message


@pytest.mark.parametrize(
    ("command", "working_dir", "exit_code", "message"),
    [
        ("no-such-command", None, 127, "command 'no-such-command' was not found"),
        ("/no/such/command", None, 127, "command '/no/such/command' was not found (from '/"),
        ("/etc/passwd", None, 126, "command '/etc/passwd' cannot be executed: Permission denied"),
        ("true", "/no/such/folder", 126, "the working directory '/no/such/folder' cannot be entered"),
    ],
)
async def test_a_command_that_cannot_be_started_says_why(
    site: Site, command: str, working_dir: str | None, exit_code: int, message: str
) -> None:
    record = await end_of(await site.command(command, working_dir=working_dir))
    assert (record.exit_code, record.reason) == (exit_code, "exited")
    assert record.error is not None
    assert message in record.error.message
    assert message in record.log_tail[0]


async def test_the_last_lines_of_the_log_are_in_the_record(any_site: Site) -> None:
    task = await any_site.command("sh", "-c", "for n in $(seq 100); do echo line $n >&2; done; exit 5")
    record = await end_of(task)
    assert record.exit_code == 5
    assert record.log_tail == [f"line {number}" for number in range(81, 101)]
    assert len(texts(task, "stderr")) == 100


async def test_a_spec_that_names_nothing_to_run_is_refused(any_site: Site) -> None:
    with pytest.raises(LaunchError, match=r"ns\.job\.0\.1 has nothing to run"):
        await any_site.runtime.start(any_site.spec())


# Ends that are asked for


async def test_who_ignores_sigterm_is_killed_after_the_grace(any_site: Site) -> None:
    task = await any_site.command("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    await wait_for_line(task, "ready")
    task.kill(0.3, "enough")
    record = await end_of(task)
    assert (record.exit_code, record.signal, record.reason, record.kill_reason) == (None, 9, "killed", "enough")


async def test_who_heeds_sigterm_has_the_time_it_needs(any_site: Site) -> None:
    task = await any_site.command(
        "sh", "-c", "trap 'echo saving; exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    )
    await wait_for_line(task, "ready")
    task.kill(PATIENCE_S, "enough")
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (7, "killed")
    assert texts(task) == ["ready", "saving"]


async def test_who_makes_use_of_its_grace_is_killed_at_once_by_force(any_site: Site) -> None:
    stubborn = "trap 'echo not yet' TERM; echo ready; while :; do sleep 1000 & wait; done"
    task = await any_site.command("sh", "-c", stubborn)
    await wait_for_line(task, "ready")
    task.kill(3600, "enough")
    await wait_for_line(task, "not yet")
    task.kill(0, "enough")
    record = await end_of(task)
    assert (record.signal, record.reason) == (signal.SIGKILL, "killed")


async def test_the_grace_is_for_the_children_too(site: Site) -> None:
    child = "trap 'sleep 0.3; echo saved; exit' TERM; echo ready; while :; do sleep 0.1; done"
    task = await site.command("sh", "-c", f'sh -c "{child}" & wait')
    await wait_for_line(task, "ready")
    task.kill(PATIENCE_S, "enough")
    record = await end_of(task)
    assert (record.signal, record.reason) == (signal.SIGTERM, "killed")
    assert texts(task) == ["ready", "saved"]


async def test_a_kill_right_after_the_start_is_not_lost(any_site: Site) -> None:
    for number in range(10):
        task = await any_site.command("sleep", "1000", key=f"ns.job.{number}.1")
        task.kill(PATIENCE_S, "changed my mind")
        record = await end_of(task)
        assert (record.signal, record.reason) == (signal.SIGTERM, "killed")


async def test_a_stopped_task_can_be_killed(any_site: Site) -> None:
    task = await any_site.command("sh", "-c", "echo ready; kill -STOP $$; sleep 1000")
    await wait_for_line(task, "ready")
    task.kill(PATIENCE_S, "stuck")
    assert (await end_of(task)).signal == signal.SIGTERM


def leave_a_runaway() -> None:
    """Leaves a grandchild in a session of its own, which holds the pipes open."""
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("runaway", os.getpid())
            os.write(write_end, b"!")
            signal.pause()
        os._exit(0)
    os.wait()
    os.read(read_end, 1)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_grandchild_in_its_own_session_ends_with_the_task(site: Site, is_killed: bool) -> None:
    def run(is_killed: bool) -> None:
        leave_a_runaway()
        print("left")
        if is_killed:
            signal.pause()

    task = await site.call(run, is_killed)
    if is_killed:
        await wait_for_line(task, "runaway")
        task.kill(0, "enough")
    record = await end_of(task)
    assert record.reason == ("killed" if is_killed else "exited")
    assert record.surviving_pids == []
    (runaway,) = (line for line in texts(task) if line.startswith("runaway"))
    assert not psutil.pid_exists(int(runaway.split()[1]))


# Fences


async def test_a_lease_that_is_not_renewed_ends_the_task(any_site: Site) -> None:
    record = await end_of(await any_site.command("sleep", "1000", fence_after_s=0.3))
    assert (record.signal, record.reason) == (signal.SIGTERM, "fenced")


async def test_what_is_started_after_its_lease_does_not_run(site: Site, tmp_path: Path) -> None:
    """As by a worker that was stopped after it claimed the attempt, and continues when another has it."""
    late = await site.command("touch", str(tmp_path / "ran"), fence_after_s=PATIENCE_S, fence_at=fence_clock())
    assert (await end_of(late)).reason == "fenced"
    assert not (tmp_path / "ran").exists()
    soon = fence_clock() + 0.3
    task = await site.command("sleep", "1000", key="ns.job.0.2", fence_after_s=PATIENCE_S, fence_at=soon)
    assert (await end_of(task)).reason == "fenced"


async def test_a_renewed_lease_lets_it_run(any_site: Site) -> None:
    task = await any_site.command("sleep", "3.5", fence_after_s=3.0)
    task.renew(PATIENCE_S)
    record = await end_of(task)
    assert (record.exit_code, record.reason) == (0, "exited")


async def test_a_lease_can_be_lifted(any_site: Site) -> None:
    task = await any_site.command("sleep", "3.5", fence_after_s=3.0)
    task.renew(None)
    assert (await end_of(task)).reason == "exited"


async def test_a_renewal_that_lay_about_renews_nothing(any_site: Site) -> None:
    task = await any_site.command("sleep", "1000", fence_after_s=PATIENCE_S)
    task.send({"renew": 5, "sent_since_boot_s": fence_clock() - 6})
    assert (await end_of(task)).reason == "fenced"


async def test_a_keeper_that_finds_the_fence_long_past_gives_no_grace(any_site: Site) -> None:
    """As when it, or the whole machine, was asleep."""
    task = await any_site.command(
        "sh", "-c", "trap '' TERM; echo ready; sleep 1000 & wait; wait", fence_after_s=3600, kill_grace_s=3600
    )
    await wait_for_line(task, "ready")
    task.send({"renew": 5, "sent_since_boot_s": fence_clock() - 3600 - 6})
    assert (await end_of(task)).reason == "fenced"


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere time-outs stand still while the machine sleeps"
)
async def test_the_keeper_is_woken_when_the_machine_wakes(site: Site) -> None:
    task = await site.command("sleep", "1000", fence_after_s=PATIENCE_S)
    assert task.pid is not None
    keeper = psutil.Process(task.pid).ppid()
    infos = [path.read_text() for path in Path(f"/proc/{keeper}/fdinfo").iterdir()]  # noqa: ASYNC240 - of the kernel
    (timer,) = [info for info in infos if "clockid" in info]
    assert "clockid: 7\n" in timer, "that of CLOCK_BOOTTIME, which goes on while the machine sleeps"
    assert "it_value: (0, 0)" not in timer


# The output


async def test_a_line_without_end_is_cut_and_does_not_pile_up(any_site: Site) -> None:
    def flood() -> None:
        for _ in range(50):
            os.write(1, b"x" * 1_000_000)

    task = await any_site.call(flood)
    assert task.pid is not None
    keeper = psutil.Process(task.pid).parent()
    assert keeper is not None
    record = await end_of(task)
    records = read_all(task)
    assert all(each.is_partial for each in records[:-1])
    assert not records[-1].is_partial
    assert sum(len(each.text) for each in records) == 50_000_000
    assert max(len(each.text) for each in records) == 64 * 1024
    assert record.dropped_bytes == 0
    peak_kib = peak_memory_kib(keeper.pid)
    template_kib = psutil.Process(any_site.template.pid).memory_info().rss // 1024
    assert peak_kib < template_kib + 8 * 1024


async def test_200_000_lines(any_site: Site) -> None:
    def count() -> None:
        sys.stdout.write("".join(f"line {number} of a chatty program\n" for number in range(200_000)))

    task = await any_site.call(count)
    record = await end_of(task)
    assert texts(task) == [f"line {number} of a chatty program" for number in range(200_000)]
    assert record.dropped_bytes == 0


async def test_odd_bytes_do_no_harm(any_site: Site) -> None:
    def mumble() -> None:
        os.write(1, b"\xff\xfe broken\n\x1b[2J\x00\nno newline at the end")

    task = await any_site.call(mumble)
    await end_of(task)
    assert texts(task) == ["\ufffd\ufffd broken", "\x1b[2J\x00", "no newline at the end"]


async def test_what_is_above_the_cap_is_dropped_and_said(any_site: Site) -> None:
    task = await any_site.command(
        "sh", "-c", "for n in $(seq 1000); do echo line $n; done; echo fine >&2", max_log_bytes=999
    )
    record = await end_of(task)
    assert texts(task)[-1] == "[fluster: output above 999 bytes was dropped]"
    assert texts(task)[:-1] == [f"line {number}" for number in range(1, len(texts(task)))]
    assert texts(task, "stderr") == ["fine"]
    assert record.dropped_bytes > 0


async def test_a_worker_that_does_not_read_holds_nothing_up(site: Site) -> None:
    gate = site.state_dir.parent / "gate"
    os.mkfifo(gate)
    task = await site.command("sh", "-c", f"for n in $(seq 20000); do echo line $n; done; echo > {gate}")
    await anyio.to_thread.run_sync(gate.read_bytes)
    await end_of(task)
    assert len(texts(task)) == 20000


# The bookkeeping


async def test_a_key_is_started_once(any_site: Site) -> None:
    results: list[str] = []

    async def start() -> None:
        try:
            await any_site.command("sleep", "1000")
            results.append("started")
        except AlreadyStartedError as error:
            results.append(str(error))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(start)
    assert set(results) == {"started", "ns.job.0.1 was started here already, and is not forgotten"}
    assert results.count("started") == 1


async def test_a_forgotten_key_can_be_started_again(any_site: Site) -> None:
    for _ in range(2):
        task = await any_site.command("true")
        await end_of(task)
        await task.forget()
        with pytest.raises(FileNotFoundError):
            task.read_log()


async def test_what_runs_is_not_forgotten(any_site: Site) -> None:
    task = await any_site.command("sleep", "1000")
    with pytest.raises(RuntimeError, match="cannot be forgotten yet"):
        await task.forget()


async def test_files_are_private(any_site: Site) -> None:
    task = await any_site.call(say, "secret")
    await end_of(task)
    (directory,) = (path for path in any_site.state_dir.iterdir() if path.is_dir())
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in directory.iterdir() if path.is_file() and path.stat().st_mode & 0o077} == set()
    assert any_site.state_dir.stat().st_mode & 0o777 == 0o700


async def test_a_second_runtime_over_the_same_state_is_refused(site: Site) -> None:
    with pytest.raises(RuntimeError, match="another worker uses"):
        ProcessRuntime(site.state_dir, site.template)


async def test_a_cancelled_start_is_left_to_the_next_runtime(site: Site) -> None:
    for number in range(20):
        with anyio.move_on_after(number / 5000):
            await site.command("sleep", "1000", key=f"ns.job.{number}.1")
    await site.runtime.close()
    site.runtime = ProcessRuntime(site.state_dir, site.template)
    adopted = await site.runtime.adopt()
    assert len(adopted) == 20
    for task in adopted:
        task.kill(0, "it was not wanted")
        assert (await end_of(task)).signal == signal.SIGKILL
        await task.forget()
    await wait_until_async(lambda: site.entries() == ["lock"], PATIENCE_S, site.entries)


async def test_a_state_folder_may_lie_deep(tmp_path: Path, shared_template: tuple[TemplateHandle, str]) -> None:
    template, mark = shared_template
    state_dir = tmp_path / ("deep" * 30) / "state"
    site = Site(state_dir, mark, template, ProcessRuntime(state_dir, template))
    task = await site.command("true")
    assert (await end_of(task)).exit_code == 0
    await task.forget()
    await site.runtime.close()


async def test_many_at_once(site: Site) -> None:
    async def run(number: int) -> None:
        task = await site.call(say, f"line {number}", key=f"ns.job.{number}.1")
        assert (await end_of(task)).exit_code == 0
        assert texts(task) == [f"line {number}"]
        await task.forget()

    async with anyio.create_task_group() as group:
        for number in range(30):
            group.start_soon(run, number)


async def test_limits_that_cannot_be_set_are_a_fault_of_the_workers_own(
    tmp_path: Path, shared_template: tuple[TemplateHandle, str]
) -> None:
    template, mark = shared_template
    groups_folder = tmp_path / "no groups here"
    runtime = ProcessRuntime(
        tmp_path / "state", template, Enforcer({"pids": CgroupController(1, groups_folder)}, missing={})
    )
    limited = Site(tmp_path / "state", mark, template, runtime)
    for start in (limited.command("echo", "never", limits=Limits(pids=8)), limited.call(print, limits=Limits(pids=8))):
        task = await start
        record = await end_of(task)
        assert record.reason == "worker_fault"
        assert record.kill_reason is not None
        assert record.kill_reason.startswith(f"its limits cannot be set: {groups_folder}/fluster-")
        assert texts(task) == []
        await task.forget()
    await runtime.close()
