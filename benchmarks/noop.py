"""A function that does nothing, in a module that imports nothing: a job imports the module of its function."""


def noop() -> None:
    """Do nothing."""
