"""Methods as callers in JSON see them: arguments are converted by annotations, and errors name what is wrong."""

from __future__ import annotations

import datetime as dt
import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from pydantic import BaseModel, Field

from fluster.actors.definition.json_methods import JsonMethod
from fluster.errors import InvalidArgumentsError

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]


class Colour(enum.Enum):
    RED = "red"


class Point(BaseModel):
    x: int
    y: float = 0.0


@dataclass
class Line:
    ends: tuple[Point, Point]
    name: str = "line"


class Shapes:
    def move(self, point: Point, lines: list[Line], *, when: dt.date, colour: Colour = Colour.RED) -> list[Point]:
        raise NotImplementedError

    def count(self, first: int, /, *rest: int, **named: Annotated[int, Field(gt=0)]) -> int:
        raise NotImplementedError

    def odd(self, lost: Missing, lock: threading.Lock, plain, number: int = 1) -> Missing:  # type: ignore[no-untyped-def] # noqa: ANN001
        raise NotImplementedError

    def told(self, ctx: Any, number: int) -> None:
        raise NotImplementedError


def method(name: str) -> JsonMethod:
    return JsonMethod(getattr(Shapes(), name), takes_context=name == "told")


def test_arguments_become_what_the_annotations_say() -> None:
    args, kwargs = method("move").arguments(
        [{"x": "1"}, [{"ends": [{"x": 1}, {"x": 2, "y": 3}]}]], {"when": "2026-01-02", "colour": "red"}
    )
    line = Line((Point(x=1), Point(x=2, y=3)))
    assert args == (Point(x=1), [line])
    assert kwargs == {"when": dt.date(2026, 1, 2), "colour": Colour.RED}
    assert method("move").arguments([], {"point": {"x": 1}, "lines": [], "when": "2026-01-02"})[0] == (Point(x=1), [])
    assert method("count").arguments(["1", 2, "3"], {"a": "4"}) == ((1, 2, 3), {"a": 4})
    assert method("told").arguments(["7"], {}) == ((7,), {})


def test_annotations_without_meaning_are_passed_over() -> None:
    assert method("odd").arguments([{"a": 1}, "no lock", None, "2"], {}) == (({"a": 1}, "no lock", None, 2), {})


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "wrong"),
    [
        (
            "move",
            [{"x": "one"}, []],
            {"when": "2026-01-02"},
            [r"point\.x: Input should be a valid integer.*not \"one\""],
        ),
        (
            "move",
            [{}, [{"ends": [{"x": 1}]}]],
            {"when": "soon"},
            [r"point\.x: Field req", r"lines\.0\.ends\.1", "when: "],
        ),
        ("count", [1, 2, "x"], {"a": 0}, [r"rest\.1: .*not \"x\"", "a: Input should be greater than 0, not 0"]),
        ("count", [], {}, ["missing a required argument: 'first'"]),
        ("told", [1, 2], {}, ["too many positional arguments"]),
        ("move", [], {"pont": 1}, ["missing a required argument: 'point'"]),
    ],
)
def test_errors_name_every_argument_that_is_wrong(
    name: str, args: list[Any], kwargs: dict[str, Any], wrong: list[str]
) -> None:
    for each in wrong:
        with pytest.raises(InvalidArgumentsError, match=each):
            method(name).arguments(args, kwargs)


def test_schemas_tell_the_arguments_by_name_and_the_result() -> None:
    parameters, returns = method("move").schemas
    assert list(parameters["properties"]) == ["point", "lines", "when", "colour"]
    assert parameters["required"] == ["point", "lines", "when"]
    assert parameters["properties"]["point"] == {"$ref": "#/$defs/Point"}
    assert parameters["properties"]["colour"]["default"] == "red"
    assert parameters["additionalProperties"] is False
    assert sorted(parameters["$defs"]) == ["Colour", "Line", "Point"]
    assert returns["items"] == {"$ref": "#/$defs/Point"}
    assert method("count").schemas[0]["required"] == ["first"]
    assert "additionalProperties" not in method("count").schemas[0]
    assert method("told").schemas == (
        {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
            "additionalProperties": False,
        },
        {"type": "null"},
    )


def test_what_has_no_schema_may_be_anything() -> None:
    parameters, returns = method("odd").schemas
    assert parameters["properties"] == {
        "lost": {},
        "lock": {},
        "plain": {},
        "number": {"type": "integer", "default": 1},
    }
    assert returns == {}


def test_two_models_of_one_name_are_told_apart() -> None:
    def other() -> type[BaseModel]:
        class Point(BaseModel):
            latitude: float

        return Point

    def both(mine: Any, other: Any) -> None: ...

    both.__annotations__ = {"mine": Point, "other": other()}
    parameters = JsonMethod(both, takes_context=False).schemas[0]
    references = [parameters["properties"][name]["$ref"] for name in ("mine", "other")]
    assert len({*references}) == 2
    assert len(parameters["$defs"]) == 2
