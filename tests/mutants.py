"""How many small faults in the pure cores their tests would notice: `python -m tests.mutants [--count 60] [--seed 1]`.

Each fault is one comparison turned, one term of a condition left out, one constant off by one, or the like. The module is imported
with it from memory, by a plugin of pytest, so that no file changes and several may run at a time. What no test notices is named.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_VARIABLE = "FLUSTER_TEST_MUTANT"  # <module>:<number>
_LONGEST_S = 120.0
CORES = {
    "fluster.worker_pool.dispatch": ("worker_pool", "map_pacing"),
    "fluster.worker_pool.pace": ("worker_pool", "map_pacing"),
    "fluster.worker_pool.work": ("worker_pool", "map_pacing"),
    "fluster_bus.leadership": ("leadership",),
    "fluster_services.controller.dispatch": ("dispatch",),
    "fluster_services.controller.judge": ("judge",),
    "fluster_services.controller.liveness": ("liveness", "judge", "roster"),
    "fluster_services.controller.reconcile": ("reconcile", "gangs"),
    "fluster_services.controller.reservation": ("scheduler", "dispatch"),
    "fluster_services.controller.roster": ("roster", "dispatch"),
    "fluster_services.controller.scheduler": ("scheduler",),
    "fluster_services.gangs": ("gangs",),
    "fluster_services.lifecycle": ("lifecycle", "gangs"),
}

_TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_TURNED_SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_TURNED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    module: str
    number: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: `{self.before}` as `{self.after}`"


def _faults(node: ast.AST) -> Iterator[ast.AST]:
    """What a node might be by mistake."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in _TURNED:
            yield ast.Compare(left, [_TURNED[type(op)]()], comparators)
        case ast.BoolOp(op=op, values=values):
            for place in range(len(values)):
                rest = [*values[:place], *values[place + 1 :]]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _TURNED_SUMS:
            yield ast.BinOp(left, _TURNED_SUMS[type(op)](), right)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _TURNED_CALLS:
            yield ast.Call(ast.Name(_TURNED_CALLS[name], ast.Load()), args, keywords)
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case _:
            pass


def _path_of(module: str) -> Path:
    """Its file, without importing the packages that it is in."""
    name = Path(*module.split(".")).with_suffix(".py")
    return next(path for folder in ("", "bus", "services") if (path := _ROOT / folder / name).exists())


class _Maker(ast.NodeTransformer):
    """Makes the fault with that number, if there are so many."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.made: tuple[ast.AST, ast.AST] | None = None
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._in_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._in_function(node)

    def _in_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._functions += 1
        for each in node.body:  # without the defaults of its parameters, nor its decorators
            self.visit(each)
        self._functions -= 1
        return node

    def visit(self, node: ast.AST) -> ast.AST:
        if self._functions and self.made is None and not isinstance(node, ast.Raise | ast.Assert):
            for fault in _faults(node):
                if self.left == 0 and self.made is None:
                    self.made = deepcopy(node), fault
                    return ast.copy_location(fault, node)
                self.left -= 1
        elif isinstance(node, ast.Raise | ast.Assert):
            return node
        visited: ast.AST = super().visit(node)
        return visited


def _mutated(module: str, number: int) -> tuple[ast.Module, Mutant] | None:
    tree = ast.parse(_path_of(module).read_text())
    maker = _Maker(number)
    maker.visit(tree)
    if maker.made is None:
        return None
    before, after = maker.made
    ast.fix_missing_locations(tree)
    return tree, Mutant(module, number, getattr(before, "lineno", 0), ast.unparse(before), ast.unparse(after))


def mutants(module: str) -> list[Mutant]:
    """All that can be made of it."""
    found: list[Mutant] = []
    while (made := _mutated(module, len(found))) is not None:
        found.append(made[1])
    return found


# ---- as a plugin of pytest ------------------------------------------------------------------------------


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, module: str, tree: ast.Module) -> None:
        self._module, self._path = module, str(_path_of(module))
        self._code: CodeType = compile(tree, self._path, "exec")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def get_source(self, fullname: str) -> None:
        del fullname

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


def _install() -> None:
    """Before any other plugin imports something."""
    module, _, number = os.environ[_VARIABLE].partition(":")
    made = _mutated(module, int(number))
    if made is None or module in sys.modules:
        raise RuntimeError(f"{_VARIABLE}={os.environ[_VARIABLE]}: no such fault, or the module is there without it")
    sys.meta_path.insert(0, _Importer(module, made[0]))


# ---- the score ------------------------------------------------------------------------------------------


def _is_noticed(mutant: Mutant) -> bool:
    tests = [f"tests/pure/test_{name}.py" for name in CORES[mutant.module]]
    options = ["-q", "-x", "-p", "tests.mutants", "-p", "no:cacheprovider", "-p", "no:randomly"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=_ROOT,
            env={**os.environ, _VARIABLE: f"{mutant.module}:{mutant.number}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # they wait for what does not come
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant}: {done.stdout}{done.stderr}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="how many to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--module", choices=sorted(CORES), help="only of this one")
    parser.add_argument("--minutes", type=float, default=15, help="begin no more after so long (default: %(default)s)")
    chosen = parser.parse_args()
    every = [mutant for module in ([chosen.module] if chosen.module else CORES) for mutant in mutants(module)]
    tried = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))
    until = time.monotonic() + 60 * chosen.minutes
    with ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, 4)) as threads:
        results = threads.map(lambda each: _is_noticed(each) if time.monotonic() < until else None, tried)
        outcomes = list(zip(tried, results, strict=True))
    for mutant, noticed in outcomes:
        if noticed is False:
            print(f"not noticed: {mutant}")
    caught = sum(outcome is True for _, outcome in outcomes)
    done = sum(outcome is not None for _, outcome in outcomes)
    print(f"{caught} of {done} faults were noticed, of {len(every)} that could be made")
    return 0


if _VARIABLE in os.environ:
    _install()

if __name__ == "__main__":
    sys.exit(main())
