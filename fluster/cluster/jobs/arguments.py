"""What callers of the job client pass, checked before anything is sent: else it fails far from the mistake, or not at
all.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

from fluster_bus.core.names import JobId, check_name

if TYPE_CHECKING:
    from fluster_bus.messages import JobRequest, JobStatus

_LONGEST_S = 100 * 365 * 86_400.0  # what is much longer no clock takes
_BEFORE_ALL = datetime(1970, 1, 1, tzinfo=UTC)


def check_requests(requests: Iterable[JobRequest]) -> list[JobRequest]:
    """The requests as a list. Raises TypeError."""
    from fluster_bus.messages import JobRequest

    if isinstance(requests, JobRequest) or not isinstance(requests, Iterable):
        raise TypeError(
            f"{_shown(requests)} is not a list of JobRequests: launch one with `launch`, several with a list"
        )
    found = list(requests)
    for request in found:
        if not isinstance(request, JobRequest):
            raise TypeError(
                f"{_shown(request)} is not a JobRequest: give one, as in JobRequest(name='train', "
                "entrypoint=Entrypoint(callable=train))"
            )
    return found


def check_job_id(value: object) -> JobId:
    """Return `value` if it can be a job's id. Raises InvalidNameError, TypeError when it is not text."""
    if not isinstance(value, str):
        from fluster_bus.messages import JobInfo

        raise TypeError(
            f"{_shown(value)} is not a job id: give "
            f"{'its job_id' if isinstance(value, JobInfo) else 'what `launch` returned'}"
        )
    # A subject is made of it, and one that is too long would end the connection.
    return JobId(check_name("job id", value))


def check_job_ids(value: object) -> list[JobId]:
    """The ids of several jobs, or of one. Raises as `check_job_id` does."""
    from fluster_bus.messages import JobInfo

    if isinstance(value, str | JobInfo) or not isinstance(value, Iterable):
        return [check_job_id(value)]
    return [check_job_id(each) for each in cast("Iterable[object]", value)]


def check_timeout(timeout: float | None) -> float | None:
    """Return `timeout` if it can be one. Raises ValueError, TypeError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: give seconds as a number, or None to wait without end")
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout={timeout!r}: give seconds from 0 on, or None to wait without end")
    return timeout


def check_patience(timeout: float | None) -> float | None:
    """How long to wait for a result: at once where nothing is left of it, without end for infinity.

    Raises ValueError, TypeError.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: give seconds as a number, or None to wait without end")
    if math.isnan(timeout):
        raise ValueError(f"timeout={timeout!r}: give a number of seconds, or None to wait without end")
    return min(timeout, _LONGEST_S)


def deadline_after(timeout: float | None) -> float | None:
    """By the monotonic clock, when so many seconds are over. Raises as `check_patience` does."""
    left_s = check_patience(timeout)
    return None if left_s is None else time.monotonic() + left_s


def check_count(name: str, value: int, least: int, meaning: str, *, most: int | None = None) -> int:
    """Return `value` if it can be so many. Raises ValueError, which says what it is to be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"{least} or more" if most is None else f"from {least} to {most:,}"
        raise ValueError(f"{name}={value!r}: give {meaning}, {bounds}")
    return value


def check_seconds(name: str, value: float) -> float:
    """Return `value` if it can be a time to wait. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}={value!r}: give seconds, such as 60")
    return float(value)


def check_limits(given: Mapping[str, int | float | str]) -> dict[str, str]:
    """{name: value} as the settings have them, in text. Raises ValueError."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str) or not str(value).strip():
            raise ValueError(f"limits: {name}={value!r}: give a number, or a size such as '1GB'")
    return {str(name): str(value) for name, value in given.items()}


def check_reason(reason: str) -> str:
    """Return `reason` if it can say why something is ended. Raises ValueError, TypeError."""
    from fluster_bus.messages.requests import MAX_REASON_CHARACTERS

    if not isinstance(reason, str):
        raise TypeError(f"reason={reason!r}: give a text, which stands in the job's record")
    if len(reason) > MAX_REASON_CHARACTERS:
        raise ValueError(
            f"reason has {len(reason):,} characters, over the limit of {MAX_REASON_CHARACTERS:,}: shorten it"
        )
    return reason


def check_states(states: Iterable[JobStatus]) -> tuple[JobStatus, ...]:
    """The states that are asked for. Raises ValueError, TypeError."""
    from fluster_bus.messages import JobStatus

    if isinstance(states, str) or not isinstance(states, Iterable):
        raise TypeError(f"states={states!r}: give a list, such as [JobStatus.RUNNING]")
    try:
        return tuple(JobStatus(state) for state in states)
    except ValueError as error:
        raise ValueError(f"states: {error}; give {', '.join(JobStatus)}") from error


def check_number(name: str, value: int | None, first: int) -> int | None:
    """Return `value` if it can be the number of a task, or of what else is counted. Raises ValueError, TypeError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: give its number as an int")
    if value < first:
        raise ValueError(f"{name}={value}: they are numbered from {first}")
    return value


def log_start(since: datetime | timedelta | None, now: datetime) -> datetime | None:
    """The moment from which on lines are wanted. Raises ValueError, TypeError."""
    if since is None:
        return None
    if isinstance(since, timedelta):
        return now - min(since, now - _BEFORE_ALL)
    if not isinstance(since, datetime):
        raise TypeError(f"since={since!r}: give a datetime with a time zone, or a timedelta: in the last so much")
    if since.utcoffset() is None:
        # Not taken for local time: clients, workers and the server need not share one.
        raise ValueError(
            f"since={since!r} has no time zone: say since.astimezone() if it is this machine's local time, or give a "
            "timedelta: in the last so much"
        )
    return max(since, _BEFORE_ALL)


def _shown(value: object) -> str:
    return f"{reprlib.repr(value)}, of type {type(value).__name__},"
