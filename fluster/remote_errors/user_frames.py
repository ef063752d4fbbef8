"""Tracebacks as users want them: from their own code on."""

from __future__ import annotations

from types import TracebackType

# What stands between Fluster and user code: its own packages, and those of Python that it runs on.
_OURS = frozenset({"fluster", "fluster_bus", "fluster_services", "asyncio", "concurrent", "threading"})
_USES_FLUSTER = "fluster.demo"


def from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is not one of ours; the whole of it when all are."""
    frame = trace
    while frame is not None:
        module = str(frame.tb_frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in _OURS or module.startswith(_USES_FLUSTER):
            return frame
        frame = frame.tb_next
    return trace
