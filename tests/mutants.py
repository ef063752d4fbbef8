"""How many small faults in the pure cores their tests would notice: `python -m tests.mutants [--count 60] [--seed 1]`.

Each fault is one comparison turned, one term of a condition left out, one constant off by one, or the like. The module is imported
with it from memory, in a process forked for it, so that no file changes and several may run at a time. What no test notices is named,
and if that is more than it was once for some module, the exit code is 1: mend the tests, or say in CORES why it is so.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_LONGEST_CPU_S, _LONGEST_S = 120, 900  # of what goes on and on, and of what waits for what does not come


class Core(NamedTuple):
    """What is known of a module."""

    tests: tuple[str, ...]
    unnoticed: int | None  # of all its faults so many are not noticed, as of the last full count; None: not yet counted


CORES = {
    "fluster.worker_pool.dispatch": Core(("worker_pool", "map_pacing"), 0),
    "fluster.worker_pool.work": Core(("worker_pool", "map_pacing"), 0),
    # Of no effect: whether the seat is open is not asked before it was seen, nor once it leads, and no write is taken twice.
    "fluster_bus.storage.leadership": Core(("leadership",), 3),
    # Of no effect: what is None together with something else that was asked before it, from where counting begins and by how much it
    # goes on, and that a reservation keeps room in the quota as well. Of some effect, and not tested yet: when room in quotas is kept
    # again, and what is asked of an array or a reservation whose records are gone.
    "fluster_services.controller.scheduling.dispatch": Core(("dispatch", "kept_free", "dispatch_of_namespaces"), 26),
    # Decides nothing: how many beats are served at once, digits that are shown, and a moment of no length.
    "fluster_services.controller.scheduling.worker_monitor": Core(("worker_monitor",), 3),
    "fluster_services.controller.state.liveness": Core(("liveness", "worker_monitor", "worker_index"), 0),
    # Of no effect: what follows of a gang is nothing for a job that is none.
    "fluster_services.controller.state.reconcile": Core(("reconcile", "dependencies", "gangs"), 1),
    # Of no effect: amounts are equally long.
    "fluster_services.controller.state.worker_index": Core(("worker_index", "dispatch"), 1),
    # Not counted as a whole yet.
    "fluster_services.controller.scheduling.order": Core(
        ("reservation", "scheduler_lines", "scheduler", "fair_scheduling", "dispatch_of_namespaces", "kept_free"), None
    ),
    # Of no effect: a gang is not overtaken by itself, and each that is listed as overtaken has been since some time.
    "fluster_services.controller.scheduling.scheduler_lines": Core(
        ("scheduler_lines", "scheduler", "fair_scheduling"), None
    ),
    # Of no effect: a line stays as long as tasks of it are out.
    "fluster_services.controller.scheduling.scheduler": Core(("scheduler_lines", "scheduler", "fair_scheduling"), None),
    # Of no effect: a gang of which all tasks wait has nothing that could be started again.
    "fluster_services.gangs": Core(("gangs",), 1),
    # Of no effect: what waits is killed at once, so a wish to do so by force finds it ended.
    "fluster_services.lifecycle": Core(("lifecycle", "retry_backoff", "dependencies", "conflicts", "gangs"), 1),
    # Of no effect: a job that is KILLED was to be.
    "fluster_services.job_lifecycle": Core(("lifecycle", "retry_backoff", "dependencies", "conflicts", "gangs"), 1),
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


# ---- imported from memory ------------------------------------------------------------------------------


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


def _install(mutant: Mutant) -> None:
    """Before anything imports it."""
    made = _mutated(mutant.module, mutant.number)
    if made is None or mutant.module in sys.modules:
        raise RuntimeError(f"{mutant}: no such fault, or the module is there without it")
    sys.meta_path.insert(0, _Importer(mutant.module, made[0]))


# ---- the score ------------------------------------------------------------------------------------------


def _run_tests(mutant: Mutant) -> int:
    """Pytest's exit code, in this process, which is of no use after that."""
    import hypothesis
    import pytest

    # The same examples for each fault and each count, which are not made smaller, nor kept for tests of the code without the fault.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
    resource.setrlimit(resource.RLIMIT_CPU, (_LONGEST_CPU_S, _LONGEST_CPU_S))
    signal.alarm(_LONGEST_S)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    _install(mutant)
    os.chdir(_ROOT)
    # What is imported once for all is not rewritten, and need not be.
    options = [
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "--hypothesis-profile=mutants",
    ]
    return int(
        pytest.main(
            [*options, *(str(next(Path("tests/pure").rglob(f"test_{name}.py"))) for name in CORES[mutant.module].tests)]
        )
    )


def _is_noticed(mutant: Mutant, status: int) -> bool:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return True  # they waited for what does not come
    if code not in (0, 1, 2):  # 2: they cannot even be collected
        raise RuntimeError(f"{mutant}: pytest ended with {code}")
    return code != 0


def outcomes(tried: Sequence[Mutant], *, processes: int, minutes: float) -> Iterator[tuple[Mutant, bool]]:
    """Whether they are noticed, each as soon as that is known; none is begun after so many minutes."""
    import hypothesis
    import pydantic
    import pytest

    import fluster_bus.messages.namespaces  # these import none of CORES
    import fluster_bus.messages.requests
    import fluster_bus.messages.worker_service

    del hypothesis, pydantic, pytest, fluster_bus  # imported once, for all that are forked
    waiting, running = deque(tried), dict[int, Mutant]()
    until = time.monotonic() + 60 * minutes
    while True:
        while waiting and len(running) < processes and time.monotonic() < until:
            mutant, code = waiting.popleft(), 3
            pid = os.fork()
            if pid == 0:
                try:
                    code = _run_tests(mutant)
                finally:
                    os._exit(code)
            running[pid] = mutant
        if not running:
            return
        pid, status = os.wait()
        mutant = running.pop(pid)
        yield mutant, _is_noticed(mutant, status)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=60, help="how many to try (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--module", choices=sorted(CORES), help="only of this one")
    parser.add_argument("--minutes", type=float, default=15, help="begin no more after so long (default: %(default)s)")
    cores = min(os.cpu_count() or 1, 4)
    parser.add_argument("--processes", type=int, default=cores, help="how many at a time (default: %(default)s)")
    chosen = parser.parse_args()
    every = [mutant for module in ([chosen.module] if chosen.module else CORES) for mutant in mutants(module)]
    tried = random.Random(chosen.seed).sample(every, min(chosen.count, len(every)))
    done, unnoticed = 0, Counter[str]()
    for mutant, noticed in outcomes(tried, processes=chosen.processes, minutes=chosen.minutes):
        done += 1
        if not noticed:
            unnoticed[mutant.module] += 1
            print(f"not noticed: {mutant}", flush=True)
    print(f"{done - unnoticed.total()} of {done} faults were noticed, of {len(every)} that could be made")
    once = {module: core.unnoticed for module, core in CORES.items() if core.unnoticed is not None}
    worse = [module for module, count in unnoticed.items() if count > once.get(module, count)]
    for module in worse:
        print(f"{module}: {unnoticed[module]} faults are not noticed; once it was {once[module]} of all")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
