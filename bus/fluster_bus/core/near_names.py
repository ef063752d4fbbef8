"""Suggests existing names for a misspelled one."""

from __future__ import annotations

from collections.abc import Iterable


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of `known` that are like `name`, the likest first."""
    import difflib  # for errors alone, and tasks share its memory

    return difflib.get_close_matches(name, sorted(known), n=3)


def did_you_mean(names: Iterable[str]) -> str:
    """`; did you mean 'this' or 'that'?`, or nothing when there are none."""
    meant = " or ".join(map(repr, names))
    return f"; did you mean {meant}?" if meant else ""


def no_worker_named(name: str, known: Iterable[str]) -> str:
    """What is said of a task that may only run on a worker which is not among `known`."""
    return f"no worker named {name!r} has been seen{near(name, known)}"


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'this'?` when there is something like it among `known`, else what there is."""
    names = sorted(known)
    if hint := did_you_mean(near_names(name, names)):
        return hint
    if not names:
        return ""
    return f"; there is {', '.join(names[:20])}{' …' if len(names) > 20 else ''}"
