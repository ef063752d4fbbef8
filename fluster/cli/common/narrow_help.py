"""The help of a command for terminals that are too narrow for a table: each option on a line, and what it does below."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

TABLE_COLUMNS = 80  # in fewer a table cuts the names of options
_LEAST_COLUMNS = 20
_INDENT = 4


def is_narrow() -> bool:
    """True when the terminal, or $COLUMNS, is too narrow for a table of options."""
    return shutil.get_terminal_size().columns < TABLE_COLUMNS


def lay_out(command: Any) -> None:
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
