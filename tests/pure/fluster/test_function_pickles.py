"""Pickles of functions: the same again as long as they mean the same."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from fluster.worker_pool.function_pickles import FunctionPickles
from tests.pure import function_pickles_helper


def script(source: str) -> dict[str, Any]:
    """The globals of a script after it ran."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<script>", "exec", dont_inherit=True), names)
    return names


def made(pickles: FunctionPickles, function: Callable[..., Any]) -> Any:
    """What a worker gets from it."""
    return pickle.loads(pickles.of(function))()


FIXED = {
    "plain": "def f(): return 1",
    "global": "x = 5\ndef f(): return x",
    "tuple": "x = (1, ('a', None))\ndef f(): return x",
    "helper": "x = 5\ndef g(n): return n and g(n - 1) + x\ndef f(): return g(2)",
    "inner": "x = 5\ndef f(): return [(lambda: x)() for _ in range(2)]",
    "closure": "def make(x):\n  def f(y=1, *, z=2): return x + y + z\n  return f\nf = make(5)",
    "module": "import json\nfrom json import loads\ndef f(): return json.dumps(loads('[1]'))",
    "annotations": "def f(x: list[int] | None = None, *, y: 'int' = 1) -> int: return y",
    "package": "import json\ndef f(): return json.decoder.JSONDecoder.__name__",
    "class": "from pathlib import Path\ndef f(): return Path('a')",
    "builtin": "from math import sqrt\ndef f(): return sqrt(4) + abs(-1)",
}


@pytest.mark.parametrize("source", FIXED.values(), ids=FIXED)
def test_one_that_cannot_have_changed_is_pickled_once(source: str) -> None:
    f, pickles = script(source)["f"], FunctionPickles()
    assert pickles.of(f) is pickles.of(f)
    assert made(pickles, f) == f()


CHANGES = {
    "a global": ("x = 5\ndef f(): return x", "x = 6"),
    "a global that comes": ("def f():\n  try: return x\n  except NameError: return 5", "x = 6"),
    "a global that goes": ("len = sum\ndef f(): return len((5, 6))", "del len"),
    "what a list holds": ("x = [5]\ndef f(): return x", "x.append(6)"),
    "what a tuple's list holds": ("x = (5, [5])\ndef f(): return x", "x[1].append(6)"),
    "a helper": ("def g(): return 5\ndef f(): return g()", "def g(): return 6"),
    "a helper's global": ("x = 5\ndef g(): return x\ndef f(): return g()", "x = 6"),
    "a helper within": ("x = 5\ndef f(): return (lambda: x)()", "x = 6"),
    "a closure's variable": (
        "def make():\n  x = 5\n  def f(): return x\n  def to(y):\n    nonlocal x\n    x = y\n  return f, to\nf, to = make()",
        "to(6)",
    ),
    "defaults": ("def f(x=5): return x", "f.__defaults__ = (6,)"),
    "defaults of keywords": ("def f(*, x=5): return x", "f.__kwdefaults__['x'] = 6"),
    "an attribute": ("def f(): return f.x\nf.x = 5", "f.x = 6"),
    "its name": ("def f(): return f.__name__", "f.__name__ = 'g'"),
    "its documentation": ("def f(): return f.__doc__", "f.__doc__ = 'What it does.'"),
    "an annotation": ("def f() -> int: return f.__annotations__", "f.__annotations__['return'] = str"),
    "a class that annotates": (
        "class A: x = 5\ndef f() -> list[A]: return f.__annotations__['return'].__args__[0].x",
        "A.x = 6",
    ),
    "its code": ("def f(): return 5\ndef g(): return 6", "f.__code__ = g.__code__"),
    "a class": ("class A: x = 5\ndef f(): return A().x", "A.x = 6"),
    "an object": ("class A: x = 5\na = A()\ndef f(): return a.x", "a.x = 6"),
    "a bound method": ("x = [5]\nadd = x.append\ndef f(): return add.__self__", "add(6)"),
    "a module that nobody can import": (
        "from types import ModuleType\nm = ModuleType('mine')\nm.x = 5\ndef f(): return m.x",
        "m.x = 6",
    ),
}


@pytest.mark.parametrize(("source", "change"), CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_taken_along(source: str, change: str) -> None:
    names, pickles = script(source), FunctionPickles()
    f = names["f"]
    before = copy.deepcopy(f())
    assert made(pickles, f) == before
    exec(change, names)
    assert f() != before
    assert made(pickles, f) == f()


def test_what_is_imported_travels_by_its_name() -> None:
    pickles = FunctionPickles()
    assert pickles.of(json.dumps) is pickles.of(json.dumps)
    assert len(pickles.of(json.dumps)) < 100


def test_what_is_registered_to_travel_by_value_does_as_it_is_then() -> None:
    helper, pickles = function_pickles_helper, FunctionPickles()
    f = script("from tests.pure.function_pickles_helper import double\ndef f(): return double()")["f"]
    by_name = pickles.of(f)
    cloudpickle.register_pickle_by_value(helper)
    try:
        assert len(pickles.of(f)) > len(by_name)
        assert made(pickles, f) == 10
        helper.number = 6
        assert made(pickles, f) == 12
    finally:
        helper.number = 5
        cloudpickle.unregister_pickle_by_value(helper)
    assert len(pickles.of(f)) == len(by_name)


def test_what_is_registered_later_travels_by_value_from_then_on() -> None:
    helper, pickles = function_pickles_helper, FunctionPickles()
    by_name = pickles.of(helper.double)
    cloudpickle.register_pickle_by_value(helper)
    try:
        assert len(pickles.of(helper.double)) > len(by_name)
    finally:
        cloudpickle.unregister_pickle_by_value(helper)
    assert pickles.of(helper.double) == by_name


def test_a_module_that_is_registered_to_travel_by_value_does_as_it_is_then() -> None:
    helper, pickles = function_pickles_helper, FunctionPickles()
    f = script("import tests.pure.function_pickles_helper as helper\ndef f(): return helper.number")["f"]
    cloudpickle.register_pickle_by_value(helper)
    try:
        assert made(pickles, f) == 5
        helper.number = 6
        assert made(pickles, f) == 6
    finally:
        helper.number = 5
        cloudpickle.unregister_pickle_by_value(helper)


def test_what_was_reloaded_travels_as_it_was() -> None:
    pickles, double = FunctionPickles(), function_pickles_helper.double
    pickles.of(double)
    importlib.reload(function_pickles_helper)
    assert pickles.of(double) != pickles.of(function_pickles_helper.double)
    assert made(pickles, double) == 10


def test_a_package_s_module_that_was_imported_meanwhile_is_imported_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_package" / "within").mkdir(parents=True)
    for name in ("__init__.py", "within/__init__.py", "within/deep.py"):
        (tmp_path / "a_package" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    f, pickles = script("import a_package\ndef f(): return a_package.within.deep.__name__")["f"], FunctionPickles()
    before = pickles.of(f)
    importlib.import_module("a_package.within.deep")
    assert before != pickles.of(f)
    assert b"a_package.within.deep" in pickles.of(f)
    assert pickles.of(f) is pickles.of(f)


def test_no_more_are_kept_than_a_few_and_nothing_that_is_no_function() -> None:
    pickles = FunctionPickles()
    functions = [script(f"def f(): return {number}")["f"] for number in range(40)]
    assert [made(pickles, f) for f in functions * 2] == [*range(40)] * 2
    assert len(pickles) <= 16
    with pytest.raises(TypeError, match="5 cannot be called"):
        pickles.of(5)  # type: ignore[arg-type]
