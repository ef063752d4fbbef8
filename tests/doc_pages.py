"""The code blocks of README and docs, run as they stand: a page's Python in one namespace, its commands by one shell's rules.

What a block needs and a reader has anyway stands before it in a comment that is not shown:

    <!-- invisible-code-block: python
    pool = deploy(cluster, Index)
    -->

A block that cannot run in CI has `<!-- skip: next "the reason" -->` before it, and stands in the list of tests/pure/project/test_docs.py.
A command line `fluster up …` runs until the page ends, as in a terminal of its own. A `python` block with tests is run by pytest.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from fluster import LocalCluster

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (
        ROOT / "README.md",
        ROOT / "benchmarks/README.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/actors/*.md"),
        *ROOT.glob("docs/how-to/*.md"),
    )
)
_TIMEOUT_S = 300.0
_IN_THE_TERMINAL = 120.0  # seconds for `fluster up` to start, or to end
LANGUAGES = ("python", "sh")


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and source of the blocks that a reader of the page sees."""
    lexer = FencedCodeBlockLexer(language=".*", mapping={"language": "language", "source": "source"})
    document = Document((ROOT / page).read_text(encoding="utf-8"), page)
    return [(region.lexemes["language"], region.lexemes["source"]) for region in lexer(document)]


def skipped(page: str) -> list[tuple[str, str]]:
    """The first line of each block that is not run everywhere, and the reason."""
    text = (ROOT / page).read_text(encoding="utf-8")
    marked = re.findall(r'<!-- skip: .*?"([^"\n]*)"\)? -->\n *```.*\n *(.*)', text)
    assert len(marked) == text.count("<!-- skip:"), "a mark without a reason, or not directly before its block"
    return [(line, reason) for reason, line in marked]


def parse(page: str, run: PageRun | None = None) -> Document:
    """A page taken apart; its blocks are run by `run`."""
    parsers = [
        CodeBlockParser(language, getattr(run, language) if run is not None else lambda _: None)
        for language in LANGUAGES
    ]
    return Document.parse(str(ROOT / page), SkipParser(), *parsers)


class PageRun:
    """What the blocks of a page share: names, the process's folder and environment, and what runs in other terminals."""

    def __init__(self) -> None:
        self._terminals: list[subprocess.Popen[str]] = []
        self._loop = asyncio.Runner()

    def run(self, page: str) -> None:
        """Run every block of the page, up to the first that fails, and end what they started."""
        document = parse(page, self)
        # As in a script: what a block defines travels to the cluster by value.
        document.namespace["__name__"] = "__main__"
        try:
            for example in document.examples():
                try:
                    example.evaluate()
                except SkipTest:
                    continue
                except BaseException as error:
                    error.add_note(f"in the block at {page}:{example.line}")
                    raise
        finally:
            self._end(document.namespace)

    def python(self, example: Example) -> None:
        """Run a block, in which `await` may stand outside of functions as in a notebook."""
        source = "\n" * (example.line + example.parsed.line_offset) + textwrap.dedent(example.parsed)
        if re.search(r"^def test_", example.parsed, re.MULTILINE):
            return self._pytest(source)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(source, example.path, "exec", flags=flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            self._loop.run(eval(code, example.namespace))
        else:
            exec(code, example.namespace)
        return None

    def _pytest(self, source: str) -> None:
        file = Path("test_of_the_page.py")
        file.write_text(source, encoding="utf-8")
        self._succeed([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)])

    def sh(self, example: Example) -> None:
        """Run the commands of a block one after the other, up to the first that fails."""
        commands: list[str] = []
        for line in textwrap.dedent(example.parsed).splitlines():
            if line.startswith("fluster up"):
                self._bash(commands)
                commands = []
                self._terminal(line)
            else:
                commands.append(line)
        self._bash(commands)

    def _bash(self, commands: list[str]) -> None:
        if any(commands):
            # What it exports is there for what follows.
            kept = Path(".exported")
            script = "\n".join([*commands, f"env -0 > {kept}"])
            self._succeed(["bash", "-euo", "pipefail", "-c", script])
            exported = dict(each.split("=", 1) for each in kept.read_text(encoding="utf-8").split("\0") if each)
            os.environ.update({name: exported[name] for name in exported if name.startswith(("FLUSTER_", "NATS_"))})

    def _succeed(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"

    def _terminal(self, line: str) -> None:
        """Start what runs until Ctrl-C, and return once it has printed what to export."""
        shell = subprocess.Popen(["bash", "-c", f"exec {line}"], stdout=subprocess.PIPE, text=True)
        self._terminals.append(shell)
        assert shell.stdout is not None
        # Other programs find it by themselves.
        assert shell.stdout.readline().startswith("export FLUSTER_CLUSTER_ADDRESS="), f"{line!r} printed no address"

    def _end(self, namespace: dict[str, Any]) -> None:
        for cluster in _local_clusters(namespace):
            cluster.shutdown()
        self._loop.close()
        for shell in self._terminals:
            shell.send_signal(signal.SIGINT)
            assert shell.stdout is not None
            with shell.stdout:
                assert shell.wait(_IN_THE_TERMINAL) == 0


def _local_clusters(namespace: dict[str, Any]) -> Iterator[LocalCluster]:
    return (value for value in list(namespace.values()) if isinstance(value, LocalCluster))


@contextlib.contextmanager
def new_users_shell(folder: Path) -> Iterator[None]:
    """This process in an empty folder, with nothing of Fluster's in its environment and this environment's programs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLUSTER_", "SLURM_", "NATS_")) or name.startswith("FLUSTER_TEST_")
    }
    programs = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    own = {"PATH": programs, "FLUSTER_RUN_DIR": str(folder / ".run")}
    with mock.patch.dict(os.environ, {**kept, **own}, clear=True), contextlib.chdir(folder):
        yield
