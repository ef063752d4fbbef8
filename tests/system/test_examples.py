"""The examples run as they stand, from a folder of their own, and are what the README and the demo show."""

import re
import subprocess
import sys
from pathlib import Path

from tests.optional import import_or_skip
from tests.system.processes import Family

ROOT = Path(__file__).parents[2]


def _run(tmp_path: Path, name: str, *arguments: str, may_say: str = "") -> str:
    """What an example prints. On stderr it says nothing, but for lines that match `may_say`."""
    family = Family()
    program = tmp_path / name
    program.write_text((ROOT / "examples" / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=tmp_path,
        env=family.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if not re.fullmatch(may_say, line)]
    assert (done.returncode, said) == (0, [])
    family.wait_gone()
    return done.stdout


def test_quickstart(tmp_path: Path) -> None:
    assert _run(tmp_path, "quickstart.py").splitlines() == ["101", "101", "[111, 111]", "[0, 1, 4, 9, 16]"]


def test_quickstart_is_what_the_readme_shows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    quickstart = (ROOT / "examples/quickstart.py").read_text(encoding="utf-8")
    assert _words(quickstart) in [_words(code) for code in shown]


def _words(code: str) -> list[list[str]]:
    """Its lines, without regard to how comments are aligned."""
    return [line.split() for line in code.splitlines()]


def test_gang(tmp_path: Path) -> None:
    assert _run(tmp_path, "gang.py") == "4 tasks together: 30\n"


def test_stdlib_index_as_a_script(tmp_path: Path) -> None:
    output = _run(tmp_path, "stdlib_index.py", "--limit-files", "60", "--find", "len", "--workers", "2")
    assert "'len' is used" in output
    assert output.splitlines()[-1] == "The single process counts the same."


def test_the_demo_is_the_example() -> None:
    from fluster import demo as stdlib_index

    assert (ROOT / "examples/stdlib_index.py").resolve() == Path(stdlib_index.__file__)


def test_zephyr_wordcount(tmp_path: Path) -> None:
    import_or_skip("zephyr", "`make setup-zephyr` installs it")
    # Zephyr's own, when a stage is there before a worker is; and on a busy machine Fluster's, of actors that are late.
    early = (
        r"All workers are dead/failed. Waiting for workers to recover\.\.\.|\d of \d actors of .* are there after .*"
    )
    *ranking, summary = _run(tmp_path, "zephyr_wordcount.py", may_say=early).splitlines()
    assert len(ranking) == 5
    assert ranking[0].startswith("self ")
    assert re.fullmatch(r"A single process counts the same [\d,]+ words in \d+ files.", summary)
