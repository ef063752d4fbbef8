"""`python -m benchmarks [--peers DIR] [NAME…]`: run the benchmarks of this folder, all unless some are named, and print one table.

With --peers, a folder that holds venv-hyperqueue, venv-xoscar and venv-ray, or some of them, it is compared with those. A benchmark is a module
with a function `run` that gives its rows.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.hyperqueue_jobs import PEERS_VARIABLE
from benchmarks.row import Row

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
    options = parser.parse_args()
    if options.peers is not None:
        os.environ[PEERS_VARIABLE] = str(Path(options.peers).absolute())
    chosen = options.names or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(known)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("against, in the same run", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("to reach", justify="right")
    progress = Console(stderr=True)
    for name in chosen:
        started = time.monotonic()
        for row in known[name]():
            table.add_row(row.what, row.value, row.against, "" if row.ratio is None else f"{row.ratio:.2f}", row.target)
        progress.print(f"{name}: {time.monotonic() - started:.0f} s", highlight=False)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
