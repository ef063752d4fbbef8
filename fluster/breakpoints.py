"""What `breakpoint()` does in a task, whose standard input is empty: a debugger there would end at once, and say
nothing.

Tasks find it by PYTHONBREAKPOINT, so that it holds for commands and for what these start, too. A Python that has no
Fluster prints that it ignores a variable with the name of this function, and goes on.
"""

from __future__ import annotations

from typing import NoReturn

VARIABLE = "PYTHONBREAKPOINT"


def a_task_has_no_terminal(*_args: object, **_kwargs: object) -> NoReturn:
    """Raise RuntimeError, which tells how to debug."""
    raise RuntimeError(
        "breakpoint(): a task has no terminal. Call the function, or run the command, where you have one; or give "
        "the job "
        f"env_vars={{'{VARIABLE}': 'module.function'}} (--env {VARIABLE}=module.function) of a debugger that listens "
        "on a port, such as "
        "debugpy, or 0 to pass over breakpoints"
    )


HOOK = f"{__name__}.{a_task_has_no_terminal.__name__}"


def with_hook(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a task, in which `breakpoint()` calls that unless the job or the machine names something
    else.
    """
    return environment if environment.get(VARIABLE) else {**environment, VARIABLE: HOOK}
