"""What a callable gave, when its code has yet to run."""

from __future__ import annotations

from collections.abc import Coroutine
from types import AsyncGeneratorType, GeneratorType
from typing import Any


def finished(returned: Any) -> Any:
    """What a task's callable gave: what the coroutine of an `async def` returns, once it has run on a loop of its own.

    Raises TypeError for a generator, which nothing would run.
    """
    if isinstance(returned, GeneratorType | AsyncGeneratorType):
        raise TypeError(
            f"the job's callable gave the generator {returned!r}, whose code has not run: let it return a list, "
            "or yield nothing"
        )
    if not isinstance(returned, Coroutine):
        return returned
    import asyncio

    return asyncio.run(returned)
