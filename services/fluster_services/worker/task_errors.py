"""What a task's callable raised, on its way to the attempt's record: as text, and as itself where that can be."""

from __future__ import annotations

import base64
import pickle
import traceback

import cloudpickle  # type: ignore[import-untyped, unused-ignore]

from fluster_services.worker.attempt_directory import TaskError

MAX_MESSAGE_CHARACTERS = 16 * 1024
_MAX_PICKLED_ERROR_BYTES = 256 * 1024
_MAX_TRACEBACK_CHARACTERS = 64 * 1024


def describe_error(error: BaseException) -> TaskError:
    """The error as the attempt's record has it."""
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = str(error)
    except Exception as broken:
        message = f"<str() of it raised {type(broken).__name__}>"
    text = "".join(traceback.format_exception(error))
    return TaskError(
        type=name,
        message=message[:MAX_MESSAGE_CHARACTERS],
        traceback=text[-_MAX_TRACEBACK_CHARACTERS:],  # the end says what happened
        pickled=_pickle(error) or _pickle_kindred(error, name, message, text),
        is_final=getattr(kind, "is_final_failure", False) is True,
    )


def _pickle(error: BaseException) -> str | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        if len(data) > _MAX_PICKLED_ERROR_BYTES:
            return None
        pickle.loads(data)  # many exceptions pickle and then cannot be made again
    except Exception:
        return None
    return base64.b64encode(data).decode()


def _pickle_kindred(error: BaseException, name: str, message: str, text: str) -> str | None:
    from fluster.kindred_errors import kindred  # few need it

    if not isinstance(error, Exception):
        return None
    found = kindred(error, type_name=name, message=message, traceback=text[-_MAX_TRACEBACK_CHARACTERS:])
    return _pickle(found) if found is not None else None
