"""Cells of a notebook, run by a real kernel: its loop runs while they do, and its functions and classes are in no file."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.system.processes import Family
from tests.waiting import wait_until

pytestmark = pytest.mark.slow  # a kernel takes its time to come up

_START = """
import warnings
warnings.simplefilter("error")
from fluster import *
cluster = LocalCluster(workers=1)
pool = WorkerPool(cluster, 2)
"""


_new_notebook: Any = nbformat.v4.new_notebook  # they have no types
_new_cell: Any = nbformat.v4.new_code_cell


class Notebook:
    """A kernel, and the cells that it has run."""

    def __init__(self, folder: Path) -> None:
        self.document: Any = _new_notebook()
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=str(folder / "kernel.json"))
        self._client = NotebookClient(self.document, km=kernel, timeout=180)

    def __enter__(self) -> Self:
        self._client.start_new_kernel()
        self._client.start_new_kernel_client()
        return self

    def __exit__(self, *_error: object) -> None:
        self._client._cleanup_kernel()  # noqa: SLF001 - nbclient's own way to end a kernel that it was handed

    def run(self, source: str) -> list[Any]:
        """What a cell put out. Raises CellExecutionError."""
        cell = _new_cell(source)
        self.document.cells.append(cell)
        self._client.execute_cell(cell, len(self.document.cells) - 1)
        return list(cell.outputs)

    @contextmanager
    def interrupted_when(self, condition: Callable[[], bool]) -> Iterator[None]:
        """Interrupts the cell that runs once that is so."""
        kernel = int(self.text("import os\nprint(os.getpid())"))

        def interrupt() -> None:
            wait_until(condition, 60)
            os.kill(kernel, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            yield
        finally:
            interrupting.join()

    def text(self, source: str) -> str:
        """The text that it put out, which is all that it may put out."""
        outputs = self.run(source)
        assert [output.get("name", output.output_type) for output in outputs] in (["stdout"], ["execute_result"])
        return str(outputs[0].get("text") or outputs[0].data["text/plain"]).strip()

    def html(self, source: str) -> str:
        """What it shows of the value of its last expression."""
        [output] = self.run(source)
        return str(output.data["text/html"])


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    family = Family()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in family.variables.items():
            patch.setenv(name, value)
        with Notebook(tmp_path_factory.mktemp("k")) as notebook:
            assert notebook.run(_START) == []
            yield notebook
            assert "shut down" in notebook.html("pool.shutdown()\npool")
            assert "closed" in notebook.html("cluster.shutdown()\ncluster")
            notebook.run("warnings.resetwarnings()")  # the kernel itself has some
    family.wait_gone()


def test_functions_of_the_notebook_run_on_a_pool(notebook: Notebook) -> None:
    notebook.run("def square(number):\n    return number * number")
    assert notebook.text("pool.map(square, range(5)).results()") == "[0, 1, 4, 9, 16]"
    assert notebook.text("sum(pool.imap_unordered(square, range(100)))") == "328350"
    assert notebook.text("future = pool.submit(square, 7)\nprint(await future, future.result())") == "49 49"
    assert notebook.text("list(pool.executor().map(square, range(3)))") == "[0, 1, 4]"


def test_classes_of_the_notebook_are_actors(notebook: Notebook) -> None:
    notebook.run("@actor\nclass Counter:\n    n = 0\n    def add(self, k):\n        self.n += k\n        return self.n")
    notebook.run("counters = deploy(cluster, Counter)")
    assert notebook.text("print(counters.call().add(3), await counters.submit().add(4))") == "3 7"
    assert "ready" in notebook.html("counters")
    notebook.run("counters.shutdown()")


def test_what_actors_print_comes_to_the_cell(notebook: Notebook) -> None:
    notebook.run("@actor\nclass Talker:\n    def say(self, word):\n        print(word)")
    outputs = notebook.run("with deploy(cluster, Talker, name='talker') as talkers:\n    talkers.call().say('heard')")
    assert "talker[0] | heard\n" in "".join(output.text for output in outputs if output.get("name") == "stderr")


def test_a_cell_that_was_edited_is_run_again(notebook: Notebook) -> None:
    cell = """
        @actor
        class Greeter:
            def greet(self):
                return {word!r}
        greeters = deploy(cluster, Greeter, name="greeter", if_exists="replace")
        print(greeters.call().greet())
    """
    for word in ("hello", "goodbye"):
        assert notebook.text(cell.format(word=word)) == word
    notebook.run("greeters.shutdown()")


def test_an_interrupt_ends_the_wait_of_a_cell(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        from pathlib import Path
        from tests.waiting import wait_until
        begun, over = Path({str(tmp_path / "begun")!r}), Path({str(tmp_path / "over")!r})
        def hold(_number):
            begun.touch()
            wait_until(over.exists, 60)
            return "over"
    """)
    with notebook.interrupted_when((tmp_path / "begun").exists), pytest.raises(CellExecutionError, match="Interrupt"):
        notebook.run("waited = pool.map(hold, range(1), progress=True)\nwaited.results()")
    assert notebook.text("over.touch()\nwaited.results()") == "['over']"  # it went on


def test_a_job(notebook: Notebook) -> None:
    notebook.run("entrypoint = Entrypoint(callable=lambda: 6 * 7)")
    notebook.run("job = cluster.launch(JobRequest(name='answer', entrypoint=entrypoint))")
    assert notebook.text("cluster.result(job)") == "42"
    assert "SUCCEEDED" in notebook.html("cluster.poll(job)")
    html = notebook.html("cluster")
    assert "worker-0" in html
    assert "answer" in html
    assert "fluster-client:" not in html


def test_the_notebook_s_own_loop(notebook: Notebook) -> None:
    source = """
    async with await AsyncCluster.connect(cluster.address) as connected, AsyncWorkerPool(connected, 1) as own:
        print(await own.map(square, range(4)).results(), await own.submit(square, 5), "5 of 5" in own._repr_html_())
    """
    notebook.run("def square(number):\n    return number * number")
    assert notebook.text(source) == "[0, 1, 4, 9] 25 True"
    assert "nats://" in notebook.html("connected")


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("pool.map(square, range(30), progress=True).results()", "30/30"),
        ("list(pool.imap_unordered(square, range(20), progress=True))", "20/20"),
        ("list(pool.imap_unordered(square, iter(range(7)), progress=True))", "7/?"),
    ],
)
def test_a_bar_is_shown_in_its_cell(notebook: Notebook, source: str, shown: str) -> None:
    notebook.run("def square(number):\n    return number * number")
    [bar] = notebook.run(f"found = {source}")
    assert bar.output_type == "display_data"
    assert shown in bar.data["text/html"]
    assert shown in bar.data["text/plain"]


def test_a_bar_goes_on_while_the_next_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        from pathlib import Path
        from tests.waiting import wait_until
        opened = Path({str(tmp_path / "opened")!r})
        def stay(number):
            wait_until(opened.exists)
        result = pool.map(stay, range(30), progress=True)
    """)
    place = len(notebook.document.cells) - 1
    assert notebook.run("opened.touch()\nfound = result.results()") == []
    [bar] = notebook.document.cells[place].outputs
    assert "30/30" in bar.data["text/plain"]


def test_joblib(notebook: Notebook) -> None:
    notebook.run(
        "from joblib import Parallel, delayed, parallel_config\nfrom fluster.integrations.joblib import register"
    )
    notebook.run("register()\ndef square(number):\n    return number * number")
    source = "with parallel_config(backend='fluster', pool=pool):\n    print(sum(Parallel()(delayed(square)(n) for n in range(9))))"
    assert notebook.text(source) == "204"


def test_what_a_function_raises_is_raised_in_the_cell(notebook: Notebook) -> None:
    notebook.run("def fail(number):\n    raise LookupError(f'no {number}')")
    with pytest.raises(CellExecutionError, match="no 3"):
        notebook.run("pool.submit(fail, 3).result()")
    with pytest.raises(CellExecutionError, match="no 4"):
        notebook.run("await pool.submit(fail, 4)")
