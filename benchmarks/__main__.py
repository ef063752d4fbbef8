"""`python -m benchmarks [--peers DIR] [--markdown] [NAME…]`: run the benchmarks of this folder, all unless some are named, and print one table.

With --markdown, each has a table as README.md shows them, written as soon as it is measured. With --peers, a folder that holds venv-hyperqueue, venv-xoscar and venv-ray, or some of them, it is compared with those. A benchmark is a module
with a function `run` that gives its rows.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.hyperqueue_jobs import PEERS_VARIABLE
from benchmarks.row import HEADINGS, Row, as_markdown
from fluster_bus.server_process import find_binary

_PROGRAMS = ("__main__", "xoscar_actors", "ray_actors")  # the last two run in interpreters of their own


def _benchmarks() -> dict[str, Callable[[], Iterable[Row]]]:
    names = [
        module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name not in _PROGRAMS
    ]
    modules = {name: importlib.import_module(f"benchmarks.{name}") for name in sorted(names)}
    return {name: module.run for name, module in modules.items() if hasattr(module, "run")}


def main() -> None:
    known = _benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--peers", metavar="DIR", help="a folder that holds venv-<peer>")
    parser.add_argument("--markdown", action="store_true", help="tables as in benchmarks/README.md")
    options = parser.parse_args()
    if options.peers is not None:
        os.environ[PEERS_VARIABLE] = str(Path(options.peers).absolute())
    chosen = options.names or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(known)}")
    measured = _measured({name: known[name] for name in chosen})
    if options.markdown:
        print(_here(), flush=True)
        for name, rows in measured:
            print(f"\n`{name}`:\n\n{as_markdown(rows)}", end="", flush=True)
    else:
        _print_table([row for _, rows in measured for row in rows])


def _measured(chosen: dict[str, Callable[[], Iterable[Row]]]) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each, which are measured as they are asked for; how long that took goes to stderr."""
    progress = Console(stderr=True)
    for name, run in chosen.items():
        started = time.monotonic()
        yield name, list(run())
        progress.print(f"{name}: {time.monotonic() - started:.0f} s", highlight=False)


def _print_table(rows: list[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row.cells())
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _here() -> str:
    """What the figures depend on."""
    server = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"nats-server {server.removeprefix('v')}, load {os.getloadavg()[0]:.1f} before"
    )


if __name__ == "__main__":
    main()
