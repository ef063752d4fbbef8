"""Which versions of the wire a program speaks: of the subjects, messages and records by which programs of a cluster meet.

What needs a new number, and what does not, is said in docs/operations.md ("Old and new").
"""

from __future__ import annotations

from pydantic import Field

from fluster_bus.messages.parts.model import Message


class WireRange(Message):
    """The versions that a program speaks, from the oldest to the newest."""

    newest: int = Field(ge=1)
    oldest: int = Field(ge=1)

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"version {self.newest}"
        return f"versions {self.oldest} to {self.newest}"


# The one place where the number stands. Raise `newest` with a change that others have to know of, and `oldest` when what
# others did before it is no longer understood.
SPOKEN = WireRange(newest=1, oldest=1)

# Of programs from before there were numbers, which state none.
_UNSTATED = WireRange(newest=1, oldest=1)


def why_apart(theirs: WireRange | None, there: str, *, here: str, spoken: WireRange = SPOKEN) -> str | None:
    """Why two programs cannot work together, and which is to be updated; None when they have a version in common.

    `there` and `here` name the programs; `theirs` is what the other states, None when it states nothing.
    """
    stated = theirs or _UNSTATED
    if stated.oldest <= spoken.newest and spoken.oldest <= stated.newest:
        return None
    older = here if stated.oldest > spoken.newest else there
    return f"{there} speaks {stated} of Fluster's wire and {here} {spoken}: update {older}"
