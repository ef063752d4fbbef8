"""Modules that a function needs, and that are not there where it was sent."""

from __future__ import annotations


def add_remedy(error: ModuleNotFoundError, needs: str, *, sent: str) -> None:
    """Add to an error what can be done: `needs` names what has to have the module, and `sent` is when that is pickled."""
    module = (error.name or "").partition(".")[0]
    error.msg = (
        f"{error}: {needs} needs it, and the worker has none. If it is yours, pass its folder as workspace=…, define the "
        f"callable in the script that you start, or call cloudpickle.register_pickle_by_value({module}) before {sent}; if "
        "it is a package, name it in pip_packages=…"
    )
    error.args = (error.msg,)  # by which it is pickled
