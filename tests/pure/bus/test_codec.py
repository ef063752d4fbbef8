"""Payloads: what goes in comes out, in another process too, and what cannot is named."""

import dataclasses
import datetime as dt
import json
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from fluster_bus.core import codec
from fluster_bus.core.errors import InvalidMessageError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
HASHABLE = st.none() | st.integers() | st.text() | st.binary()
PLAIN = st.recursive(
    HASHABLE | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.datetimes(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.frozensets(HASHABLE, max_size=4)
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_comes_back(value: object) -> None:
    data = codec.encode(value)
    assert codec.is_pickle(data)
    assert codec.decode(data) == value
    assert codec.decode(memoryview(data)) == value


@given(JSON)
def test_json_is_told_from_pickle_by_its_first_byte(value: object) -> None:
    assert not codec.is_pickle(codec.encode_json_result(value))


def test_nothing_is_a_json_call() -> None:
    assert not codec.is_pickle(b"")


def test_lambdas_closures_and_local_classes_come_back() -> None:
    offset = 2

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

        def moved(self) -> int:
            return self.x + offset

    function, point = codec.decode(codec.encode((lambda x: x + offset, Point(3))))
    assert function(1) == 3
    assert point.moved() == 5


def test_what_a_script_defines_is_taken_along(tmp_path: Path) -> None:
    """The reader's `__main__` is another one."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import enum, sys
            from dataclasses import dataclass
            from fluster_bus.core import codec

            FACTOR = 10

            @dataclass
            class Point:
                x: int
                def scaled(self):
                    return self.x * FACTOR

            class Colour(enum.Enum):
                RED = 1

            class Oops(Exception):
                pass

            def scale(point):
                return point.scaled() + Colour.RED.value

            nested = {"list": [Point(4)], "text": "__main__"}
            value = (scale, Point(4), Point, Oops("bad"), nested, lambda x: scale(Point(x)))
            sys.stdout.buffer.write(codec.encode(value))
        """)
    )
    import_path = ":".join(path for path in sys.path if path)
    written = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": import_path}, capture_output=True, check=True
    ).stdout
    scale, point, point_class, error, nested, function = codec.decode(written)
    assert scale(point) == 41
    assert point_class(2).scaled() == 20
    assert type(error).__name__ == "Oops"
    assert error.args == ("bad",)
    assert nested["list"][0].x == 4
    assert function(3) == 31
    assert TypeAdapter(point_class).validate_python({"x": 5}).scaled() == 50
    assert [field.default for field in dataclasses.fields(point_class)] == [dataclasses.MISSING]


class _Unprintable:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        for value, name in (
            (threading.Lock(), "lock"),
            ({"file": file}, "TextIOWrapper"),
            ((x for x in "abc"), "generator"),
            (sys._getframe(), "frame"),  # noqa: SLF001 - Python's way to a frame
        ):
            with pytest.raises(TypeError, match=name) as raised:
                codec.encode(value)
            assert raised.value.__cause__ is not None


def test_the_error_is_a_type_error_whatever_the_value_says_of_itself() -> None:
    with pytest.raises(TypeError, match="lock"):
        codec.encode(_Unprintable())
    with pytest.raises(TypeError) as raised:
        codec.encode([threading.Lock(), "x" * 10_000])
    assert len(str(raised.value)) < 1_000


def test_what_refers_to_itself_comes_back() -> None:
    knot: list[object] = []
    knot.append(knot)
    again = codec.decode(codec.encode(knot))
    assert again[0] is again


# ---- JSON calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "call"),
    [
        (b"", ([], {})),
        (b"  \n", ([], {})),
        (b"[]", ([], {})),
        (b"[1, 2]", ([1, 2], {})),
        (b"{}", ([], {})),
        (b'{"args": [1]}', ([1], {})),
        (b'{"kwargs": {"a": 1}}', ([], {"a": 1})),
        (b'{"args": [1], "kwargs": {"a": [2]}}', ([1], {"a": [2]})),
        (b'\xef\xbb\xbf["bom"]', (["bom"], {})),
    ],
)
def test_calls_in_json(data: bytes, call: tuple[list[object], dict[str, object]]) -> None:
    assert codec.decode_json_call(data) == call


@pytest.mark.parametrize(
    "data",
    [
        b"5",
        b'"text"',
        b"null",
        b"true",
        b"{",
        b"[1,",
        b"nonsense",
        b"\xff\xff",
        b'{"a": 1}',
        b'{"args": 1}',
        b'{"args": {}, "kwargs": {}}',
        b'{"kwargs": []}',
        b'{"args": [], "extra": 1}',
        b"[" * 100_000,
    ],
)
def test_bad_calls_are_answered_with_the_forms_that_are_good(data: bytes) -> None:
    with pytest.raises(InvalidMessageError, match=r'send \{"args"') as raised:
        codec.decode_json_call(data)
    assert len(str(raised.value)) < 500


@given(st.lists(JSON, max_size=3), st.dictionaries(st.text(), JSON, max_size=3))
def test_json_calls_come_back(args: list[object], kwargs: dict[str, object]) -> None:
    assert codec.decode_json_call(json.dumps({"args": args, "kwargs": kwargs}).encode()) == (args, kwargs)


def test_results_and_errors_in_json() -> None:
    assert codec.encode_json_result([1, {"a": None}]) == b'{"result": [1, {"a": null}]}'
    error = codec.encode_json_error("ValueError", "no\ngood", "Traceback …")
    assert error.startswith(b'{"error": {"type": "ValueError", "message": "no\\ngood", "traceback": "Traceback')


class _Point(BaseModel):
    x: int
    seen: dt.date


@dataclass
class _Pair:
    left: _Point
    right: tuple[int, ...] = (1, 2)


def test_models_and_dataclasses_are_written_as_objects() -> None:
    point = _Point(x=1, seen=dt.date(2026, 1, 2))
    text = json.dumps({"result": [{"left": {"x": 1, "seen": "2026-01-02"}, "right": [1, 2]}, [3]]})
    assert codec.encode_json_result([_Pair(point), {3}]) == text.encode()


def _deep() -> list[object]:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "value", [object(), float("nan"), {(1, 2): 3}, b"bytes", _deep()], ids=lambda value: type(value).__name__
)
def test_results_without_json_form(value: object) -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        codec.encode_json_result(value)
