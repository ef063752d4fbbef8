"""What every message has in common: frozen, strict when made here, lenient when it comes from another version."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from fluster_bus.core.errors import InvalidMessageError
from fluster_bus.core.names import did_you_mean, near_names

T = TypeVar("T")

if TYPE_CHECKING:
    Many = list[T] | tuple[T, ...]  # a list may be given
else:
    Many = tuple[T, ...]  # and is made one of these

_NOTHING_UNKNOWN: dict[str, object] = {}  # one for all, since messages are frozen
_MAX_PROBLEM_CHARACTERS = 200  # of each: names of fields and values are as long as their writer likes


class _Arrived(dict[str, object]):
    """The unknown fields of a message that was read: a newer sender gave them, so this program made no mistake."""


@functools.cache
def _all_fields(kind: type[BaseModel]) -> set[str]:
    return set(kind.model_fields)


class _Called(type(BaseModel)):  # type: ignore[misc]  # mypy does not follow it
    """What happens when a program makes a message by calling its class; what is read from JSON does not come here."""

    def __call__(cls: Any, *values: Any, **fields: Any) -> Any:
        if values:
            fields = {**_by_position(cls, values, fields), **fields}
        try:
            return super().__call__(**fields)
        except ValidationError as error:
            problems = list(_problems(cls, fields, error))
            hides_input = bool(cls.model_config.get("hide_input_in_errors"))
            raise ValidationError.from_exception_data(error.title, problems, hide_input=hides_input) from None


def _by_position(kind: Any, values: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    if len(values) > len(kind.by_position):
        taken = f"at most {', '.join(kind.by_position)}" if kind.by_position else "no values"
        raise TypeError(f"{kind.__name__} takes {taken} by position, and {len(values)} were given: name them")
    given = dict(zip(kind.by_position, values, strict=False))
    for name in given.keys() & named.keys():
        raise TypeError(f"{kind.__name__} was given {name} twice")
    return given


def _problems(kind: type[BaseModel], given: Mapping[str, object], error: ValidationError) -> Iterator[InitErrorDetails]:
    """What is wrong, without pydantic's prefixes and addresses, and without what follows from names that are unknown."""
    unknown = [name for name in given if name not in kind.model_fields]
    meant = {name: near_names(name, kind.model_fields) for name in unknown}
    for name, near in meant.items():
        hint = did_you_mean(near).removeprefix("; ") or f"{kind.__name__} has {', '.join(kind.model_fields)}"
        yield _problem("unknown", f"unknown, {hint}", (name,), given[name])
    missed = {near[0] for near in meant.values() if near}
    for problem in error.errors(include_url=False, include_context=False):
        is_of_whole = not problem["loc"]  # perhaps as what is meant was not given, or that the name is unknown
        is_missed = problem["type"] == "missing" and problem["loc"][0] in missed
        if not unknown or not (is_of_whole or is_missed):
            yield _problem(problem["type"], in_our_words(problem["msg"]), problem["loc"], problem["input"])


def _problem(kind: Any, said: str, place: tuple[int | str, ...], given: Any) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError(kind, "{said}", {"said": said}), loc=place, input=given)


def is_carried(text: str) -> bool:
    """True for text that a message, and then a process, can be given: a shell's words may have bytes that are not UTF-8."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def in_our_words(message: str) -> str:
    """What pydantic says of a value, without the prefix before what our own checks say."""
    if message.startswith("Input should be"):
        message = message.partition(", unable to ")[0]
    return message.removeprefix("Value error, ").replace("Input should be", "it must be")


_CALLED: Any = {"metaclass": _Called}  # unseen by mypy, for which messages stay what pydantic's plugin makes of them


class Message(BaseModel, **_CALLED):
    """A frozen model that travels as JSON. Unknown fields of a newer sender are kept and passed on."""

    by_position: ClassVar[tuple[str, ...]] = ()  # the fields that may be given without their names

    # Only a model that allows unknown fields writes them again; `_no_unknown_here` keeps them to what arrives.
    # Numbers that JSON does not have are refused: they would be written as null, which no reader takes.
    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="allow", ser_json_bytes="base64", val_json_bytes="base64", allow_inf_nan=False
    )

    @model_validator(mode="after")
    def _no_unknown_here(self, info: ValidationInfo) -> Self:
        # Called again for each message that becomes a part of another.
        if not self.__pydantic_extra__ or isinstance(self.__pydantic_extra__, _Arrived):
            return self
        if info.mode == "json":
            object.__setattr__(self, "__pydantic_extra__", _Arrived(self.__pydantic_extra__))
        else:
            known = type(self).model_fields
            unknown = ", ".join(repr(name) for name in self.__pydantic_extra__)
            hint = did_you_mean([near for name in self.__pydantic_extra__ for near in near_names(name, known)[:1]])
            raise ValueError(f"{type(self).__name__} has no field {unknown}{hint or '; it has ' + ', '.join(known)}")
        return self

    def model_copy(self, *, update: Mapping[str, object] | None = None, deep: bool = False) -> Self:
        """The message with some fields changed; they are not checked.

        Records are copied at each step of each task, and what pydantic does besides takes most of the time.
        """
        if deep or not update or not update.keys() <= self.__pydantic_fields__.keys():
            return super().model_copy(update=update, deep=deep)
        kind = type(self)
        copied = kind.__new__(kind)
        object.__setattr__(copied, "__dict__", {**self.__dict__, **update})
        # Shared, as messages are frozen.
        object.__setattr__(copied, "__pydantic_extra__", self.__pydantic_extra__)
        object.__setattr__(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__ | update.keys())
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    def compact_copy(self, update: Mapping[str, object]) -> Self:
        """As `model_copy`, for one of many that are kept: which fields were set is not, and takes as much as the fields.

        Each str or Message of another place that is meant to be shared has to be in `update`.
        """
        kind = type(self)
        copied = kind.__new__(kind)
        object.__setattr__(copied, "__dict__", {**self.__dict__, **update})
        object.__setattr__(copied, "__pydantic_extra__", self.__pydantic_extra__ or _NOTHING_UNKNOWN)
        object.__setattr__(copied, "__pydantic_fields_set__", _all_fields(kind))
        object.__setattr__(copied, "__pydantic_private__", None)
        return copied

    def without_unknown(self) -> Self:
        """The message without the fields that this version does not know, of which there may be megabytes."""
        if not self.__pydantic_extra__:
            return self
        copied = self.compact_copy({})
        object.__setattr__(copied, "__pydantic_extra__", _NOTHING_UNKNOWN)
        return copied

    def __deepcopy__(self, memo: dict[int, object] | None = None) -> Self:
        return self  # frozen; pydantic copies the default of a field for every model that it reads

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read a message. Raises InvalidMessageError, which names the fields that are wrong."""
        try:
            return cls.model_validate_json(data or b"{}")
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc']) or 'message'}: {problem['msg']}"[
                    :_MAX_PROBLEM_CHARACTERS
                ]
                for problem in error.errors(include_url=False, include_context=False)[:5]
            )
            raise InvalidMessageError(f"no valid {cls.__name__}: {problems}") from error
