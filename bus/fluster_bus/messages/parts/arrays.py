"""Arrays: many tasks of one job that have nothing to do with each other but their number."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, model_validator

from fluster_bus.messages.parts.model import Message

_TEXT = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?(?::(0*[1-9]\d{0,8}))?(?:%(0*[1-9]\d{0,8}))?")


class TaskArray(Message):
    """Task numbers `first`, `first + step`, … up to `last`, of which at most `at_once` run at the same time.

    Written as text: `0-99`, `0-99:10` for every tenth, `0-99%8` for at most eight at once, `7` for one alone.
    """

    first: int = Field(ge=0)
    last: int = Field(ge=0)
    step: int = Field(default=1, ge=1)
    at_once: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        if isinstance(value, range):
            if not value or value.start < 0 or value.step < 0:
                raise ValueError(f"invalid array {value!r}: expected task numbers from 0 on, in ascending order")
            return {"first": value[0], "last": value[-1], "step": value.step}
        if not isinstance(value, str):
            return value
        match = _TEXT.fullmatch(value)
        if match is None:
            raise ValueError(
                f"invalid array {value[:100]!r}: expected FIRST-LAST[:STEP][%AT_ONCE], such as 0-99, 0-99:10 or 0-99%8"
            )
        first, last, step, at_once = match.groups()
        fields = {"first": first, "last": last or first, "step": step, "at_once": at_once}
        return {name: int(text) for name, text in fields.items() if text is not None}

    @model_validator(mode="after")
    def _has_tasks(self) -> Self:
        if self.last < self.first:
            raise ValueError(f"invalid array {self}: its last number is below its first")
        return self

    @property
    def ids(self) -> range:
        """The numbers of its tasks, in their order."""
        return range(self.first, self.last + 1, self.step)

    def __str__(self) -> str:
        step = f":{self.step}" if self.step != 1 else ""
        return f"{self.first}-{self.last}{step}" + (f"%{self.at_once}" if self.at_once is not None else "")


def number_in(array: TaskArray | None, task: int) -> int:
    """The number by which the task of that rank is shown: that of the array, if the job is one, else its rank."""
    return array.ids[task] if array is not None and task < len(array.ids) else task
