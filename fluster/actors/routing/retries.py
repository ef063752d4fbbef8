"""Which calls are sent again, and after which pause: decided here, without any I/O."""

from __future__ import annotations

from fluster.actors.protocol import frames
from fluster.actors.protocol.calls import Broadcast, Done
from fluster.actors.protocol.failures import RETRY, advice_of
from fluster.actors.protocol.frames import Moment
from fluster.actors.routing.routing import NobodyServesError
from fluster.errors import ActorDiedError, ConnectionLostError

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


def pause_before_retry(done: Done, allowed: int, now: Moment) -> float | None:
    """Seconds until a call is sent again; None when it is over, as it is when its deadline would come first.

    `allowed` is how many retries its method declares.
    """
    call = done.call
    if isinstance(call, Broadcast) or call.retried >= allowed or not _is_worth_another_try(done):
        return None
    # Spread by a quarter to either side, so that those that failed together do not come back together.
    spread = 0.75 + (call.order * 0.618) % 1 / 2
    pause_s = min(FIRST_PAUSE_S * 2.0 ** min(call.retried, 16), LONGEST_PAUSE_S) * spread
    if call.deadline is not None and frames.seconds_between(now, call.deadline) <= pause_s:
        return None
    return pause_s


def _is_worth_another_try(done: Done) -> bool:
    match done.error:
        case None:  # the actor's own answer
            return advice_of(done.payload) == RETRY
        case ActorDiedError():  # one that is meant for this actor alone cannot go to another
            return getattr(done.call, "pinned", None) is None
        case error:
            return isinstance(error, ConnectionLostError | NobodyServesError)
