"""The names of the methods of an actor that Fluster itself calls."""

ON_START, ON_STOP, ON_FAILURE, ON_RESTORE = "on_start", "on_stop", "on_failure", "on_restore"
HOOKS = frozenset({ON_START, ON_STOP, ON_FAILURE, ON_RESTORE})
