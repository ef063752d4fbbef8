"""Methods as callers see them who speak JSON: what their arguments must be, and what they return."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode, JsonSchemaValue
from pydantic_core import PydanticSerializationError, to_jsonable_python

from fluster.errors import InvalidArgumentsError

_ANY: TypeAdapter[object] = TypeAdapter(Any)
_RETURN = "return"
_REF_TEMPLATE = "#/$defs/{model}"


class JsonMethod:
    """The annotations of a method at work: JSON arguments are validated and converted by them, as pydantic does.

    An annotation that cannot be resolved, or that pydantic knows nothing of, is passed over: the argument arrives as
    JSON has it.
    """

    def __init__(self, function: Callable[..., object], *, takes_context: bool) -> None:
        """`function` is bound: called without `self`. Its first parameter is not the caller's if it takes a context."""
        self._name = getattr(function, "__name__", repr(function))
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some callables of C have none
            signature = inspect.Signature(_any_parameters())
        parameters = list(signature.parameters.values())[1 if takes_context else 0 :]
        self._signature = signature.replace(parameters=parameters)
        scope = getattr(inspect.unwrap(function), "__globals__", {})
        self._adapters = {each.name: _adapter(each.annotation, scope) for each in parameters}
        self._result = _adapter(signature.return_annotation, scope)

    def arguments(
        self, args: list[object], kwargs: Mapping[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """What to call the method with. Raises InvalidArgumentsError, which names each argument that is wrong."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArgumentsError(f"{self._name}{self._signature}: {error}") from error
        wrong: list[str] = []
        for name, value in bound.arguments.items():
            check = functools.partial(_validated, self._adapters[name], wrong)
            match self._signature.parameters[name].kind:
                case inspect.Parameter.VAR_POSITIONAL:
                    bound.arguments[name] = tuple(check((name, at), each) for at, each in enumerate(value))
                case inspect.Parameter.VAR_KEYWORD:
                    bound.arguments[name] = {key: check((key,), each) for key, each in value.items()}
                case _:
                    bound.arguments[name] = check((name,), value)
        if wrong:
            raise InvalidArgumentsError(f"{self._name}{self._signature}: {'; '.join(wrong)}")
        return bound.args, bound.kwargs

    @functools.cached_property
    def schemas(self) -> tuple[JsonSchemaValue, JsonSchemaValue]:
        """JSON schemas: of an object with the arguments by name, in the order of the parameters, and of the result."""
        parameters = self._signature.parameters.values()
        named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        # Together, so that two models of one name are distinguished.
        described, definitions = TypeAdapter.json_schemas(
            [(each.name, "validation", self._adapters[each.name]) for each in named if self._is_described(each.name)],
            ref_template=_REF_TEMPLATE,
        )
        found = {each.name: described.get((each.name, "validation"), {}) for each in named}
        for each in named:
            if each.default is not each.empty:
                found[each.name] |= _default(each.default)
        arguments: JsonSchemaValue = {"type": "object", "properties": found}
        required = [each.name for each in named if each.default is each.empty]
        if required:
            arguments["required"] = required
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            arguments["additionalProperties"] = False
        return {**arguments, **definitions}, _schema_of(self._result, "serialization")

    def _is_described(self, name: str) -> bool:
        adapter = self._adapters[name]
        return adapter is not _ANY and _schema_of(adapter, "validation") != {}

    @property
    def metadata(self) -> dict[str, str]:
        """The schemas as the services API tells them, `parameters` and `returns`: JSON in text."""
        parameters, returns = self.schemas
        return {"parameters": json.dumps(parameters), "returns": json.dumps(returns)}


def _any_parameters() -> list[inspect.Parameter]:
    return [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]


def _adapter(annotation: object, scope: dict[str, object]) -> TypeAdapter[object]:
    if annotation is inspect.Signature.empty:
        return _ANY
    try:
        # Each by itself: one that names something that is not there does not take the others with it.
        alone = SimpleNamespace(__annotations__={_RETURN: annotation})
        hint = get_type_hints(alone, scope, include_extras=True)[_RETURN]
        return _ANY if hint is Any else TypeAdapter(hint)
    except Exception:  # a user's annotation may be anything, and fail in any way
        return _ANY


def _validated(adapter: TypeAdapter[object], wrong: list[str], path: tuple[str | int, ...], value: object) -> object:
    if adapter is _ANY:
        return value
    try:
        # As JSON, which is strict in less: there a text is also a date, and a list a tuple.
        return adapter.validate_json(json.dumps(value))
    except ValidationError as error:
        for each in error.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in (*path, *each["loc"]))
            wrong.append(f"{where}: {each['msg']}, not {json.dumps(each['input'], default=repr)[:80]}")
        return value


def _schema_of(adapter: TypeAdapter[object], mode: JsonSchemaMode) -> JsonSchemaValue:
    try:
        return adapter.json_schema(mode=mode, ref_template=_REF_TEMPLATE)
    except Exception:  # it can be read and written, yet has no schema: a callable, or what a user's hook refuses
        return {}


def _default(value: object) -> dict[str, object]:
    try:
        return {"default": to_jsonable_python(value)}
    except PydanticSerializationError:
        return {}
