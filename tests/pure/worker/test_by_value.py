"""Functions that travel by value keep where they come from."""

import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from fluster_bus.core import codec
from fluster_bus.payloads import pickles
from fluster_services.worker.task import task_result

_SCRIPT = """
def outer(value):
    def inner():
        return 1 / value
    return inner()
"""


def script(file: Path) -> Any:
    file.write_text(_SCRIPT, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(_SCRIPT, str(file), "exec", dont_inherit=True), names)
    return names["outer"]


def _as_result(value: Any) -> bytes:
    return bytes(task_result.pickled_value(value))


def _as_call(value: Any) -> bytes:
    dumped = pickles.dump(value)
    return dumped if isinstance(dumped, bytes) else dumped.joined()


@pytest.mark.parametrize("dump", [codec.dumps_by_value, codec.encode, _as_call, _as_result])
def test_a_traceback_shows_the_file_and_the_line(dump: Any, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    travelled = pickle.loads(dump(script(file)))
    with pytest.raises(ZeroDivisionError) as raised:
        travelled(0)
    frames = traceback.extract_tb(raised.tb)[-2:]
    assert [(frame.filename, frame.lineno, frame.line) for frame in frames] == [
        (str(file), 5, "return inner()"),
        (str(file), 4, "return 1 / value"),
    ]


def test_it_can_be_read_without_fluster(tmp_path: Path) -> None:
    file = tmp_path / "pickled"
    file.write_bytes(codec.dumps_by_value(script(tmp_path / "train.py")))
    program = f"import pickle, sys; sys.modules.update(fluster=None, fluster_bus=None); print(pickle.load(open({str(file)!r}, 'rb'))(2))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"0.5\n"
