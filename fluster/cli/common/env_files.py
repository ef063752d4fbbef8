"""Environment variables as people write them: NAME=VALUE, alone or in a file."""

from __future__ import annotations

import os
import re

from fluster.cli.common.exit_codes import CommandError, ExitCode

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def split_assignment(option: str, text: str) -> tuple[str, str]:
    """The name and the value in NAME=VALUE. Raises CommandError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CommandError(f"{option}={text!r}: write NAME=VALUE", ExitCode.USAGE)
    return name, value


def read_env_file(text: str, file: str) -> dict[str, str]:
    """The variables in a file as `docker run --env-file` and shells read it.

    A line is NAME=VALUE, which may begin with `export` and have its value in quotes, or a NAME alone, whose value is the present one
    if it is set; empty lines and those that begin with # are left out. Raises CommandError, which names file and line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        assignment = line.strip().removeprefix("export ").strip()
        if not assignment or assignment.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not _NAME.fullmatch(name):
            raise CommandError(f"--env-file {file}, line {number}: write NAME=VALUE", ExitCode.USAGE)
        if equals:
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            variables[name] = value[1:-1] if is_quoted else value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables
