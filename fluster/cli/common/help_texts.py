"""What `--help` shows of commands: paragraphs that fit any width, and options in words instead of Python's types."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from fluster.cli.common.narrow_help import is_narrow, lay_out
from fluster.cli.common.options import MAX_SECONDS

_NUMBERS = {"int": "N", "float": "NUMBER"}  # by the first word of what typer shows


def put_into_words(group: Any) -> None:
    """Have the help of a group, and of all commands in it, speak to people rather than to programmers."""
    narrow = is_narrow()
    for command in _all_of(group):
        if narrow:
            lay_out(command)
        else:
            command.help = flowing(command.help or "")
        context = typer.Context(command)
        for parameter in [*command.params, command.get_help_option(context)]:  # made once, and kept by the command
            _describe(parameter, context)


def _all_of(group: Any) -> Iterator[Any]:
    yield group
    for command in getattr(group, "commands", {}).values():
        yield from _all_of(command)


def flowing(text: str) -> str:
    """The text with one line for each paragraph, to be broken where the terminal ends. What is indented stays as it is."""
    paragraphs = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines: list[str] = []
        for line in paragraph.splitlines():
            if line.startswith(" "):
                # The markup, which is not seen, keeps typer from taking the indentation away.
                lines.append(f"[none]{line}[/none]")
            elif lines and not lines[-1].startswith("[none]"):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _describe(parameter: Any, context: Any) -> None:
    if getattr(parameter, "is_flag", False):
        parameter.metavar = ""  # a flag takes no value
        return
    if parameter.param_type_name == "argument":
        parameter.display_type = lambda _context: None  # what it is stands behind it
        return
    if parameter.metavar is None:
        parameter.metavar = _NUMBERS.get(parameter.display_type(context).strip("<>").partition(" ")[0])
    least, most = parameter.min, parameter.max
    if most is not None and most >= MAX_SECONDS:
        most = None
    parameter.min = parameter.max = None  # the help has its own words for them; the type checks them
    text, has_example, example = (parameter.help or "").partition(" Example: ")
    if most is not None:
        text += f" From {least:,} to {most:,}."
    elif least is not None and least >= 1:
        text += f" At least {least:,}."
    parameter.help = text + has_example + example
