"""Lays out `--help`: paragraphs that fit any width, options in words instead of Python's types, no table where it is
too narrow.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from fluster.cli.common.options import MAX_SECONDS

_TABLE_COLUMNS = 80  # in fewer a table cuts the names of options
_LEAST_COLUMNS = 20
_INDENT = 4
_NUMBERS = {"int": "N", "float": "NUMBER"}  # by the first word of what typer shows


def put_into_words(group: Any) -> None:
    """Have the help of a group, and of all commands in it, speak to people rather than to programmers."""
    narrow = _is_narrow()
    for command in _all_of(group):
        if narrow:
            _lay_out(command)
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
    """The text with one line for each paragraph, to be broken where the terminal ends. What is indented stays as it
    is.
    """
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


# ---- narrow terminals ----------------------------------------------------------------------------------


def _is_narrow() -> bool:
    """True when the terminal, or $COLUMNS, is too narrow for a table of options."""
    return shutil.get_terminal_size().columns < _TABLE_COLUMNS


def _lay_out(command: Any) -> None:
    """Have the help of a command fit a narrow terminal. Its `help` is still as it was written."""
    text = inspect.cleandoc(command.help or "")

    def format_help(context: Any, formatter: Any) -> None:
        columns = max(shutil.get_terminal_size().columns, _LEAST_COLUMNS)
        blocks = [
            _filled(f"Usage: {context.command_path} {' '.join(command.collect_usage_pieces(context))}", columns),
            *_paragraphs(text, columns),
            *_sections(command, context, columns),
        ]
        if command.epilog:
            blocks.append(_filled(command.epilog, columns))
        formatter.write("\n\n".join(blocks) + "\n")

    command.format_help = format_help


def _paragraphs(text: str, columns: int) -> Iterator[str]:
    for paragraph in filter(None, text.split("\n\n")):
        lines: list[str] = []
        for line in paragraph.splitlines():
            if lines and not line.startswith(" ") and not lines[-1].startswith(" "):
                lines[-1] += f" {line}"
            else:
                lines.append(line)
        yield "\n".join(_filled(line, columns, hanging="  " if line.startswith(" ") else "") for line in lines)


def _sections(command: Any, context: Any, columns: int) -> Iterator[str]:
    arguments: list[tuple[str, str]] = []
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            (arguments if parameter.param_type_name == "argument" else options).append(record)
    commands = [
        (name, " ".join(inspect.cleandoc(each.help or "").partition("\n\n")[0].split()))
        for name, each in getattr(command, "commands", {}).items()
        if not each.hidden
    ]
    for title, records in (("Arguments", arguments), ("Options", options), ("Commands", commands)):
        if records:
            yield "\n".join([f"{title}:", *(_record(name, about, columns) for name, about in records)])


def _record(name: str, about: str, columns: int) -> str:
    shown = _filled(f"  {name}", columns, hanging="  ")
    return f"{shown}\n{_filled(' ' * _INDENT + about, columns)}" if about else shown


def _filled(text: str, columns: int, hanging: str = "") -> str:
    """The text in lines as long as the terminal is wide. Words, such as options and addresses, stay whole."""
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.fill(
        text.strip(),
        columns,
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
