"""What Fluster raises, beside users' own exceptions, which arrive as themselves.

FlusterError
├── BusError
│   ├── ConnectError              no server there, or it refused the credentials
│   │   ├── CredentialsError
│   │   └── UntrustedServerError  its certificate has expired, is of another host, or of an unknown authority
│   ├── DisconnectedError         the connection is lost; it is being rebuilt
│   ├── ClosedError               you closed this connection
│   ├── RequestTimeoutError       a TimeoutError: no answer in time
│   ├── NoRespondersError         a request that no process answers, such as that for a controller while none runs
│   ├── ServiceError              a service answered with an error; `code` is stable
│   │   ├── BusyError             it has too many requests of this namespace: ask again in a moment
│   │   └── WireVersionError      it and this program have no version of the wire in common: update one
│   ├── MessageTooLargeError      a ValueError
│   ├── AddressError              a ValueError: invalid address of the bus, or its file is not private
│   │   └── NoAddressError        no address is given, and no cluster was found without one
│   ├── InvalidNameError          a ValueError: a name or an id that cannot be one
│   ├── InvalidMessageError       a ValueError: what arrived is not what was agreed
│   ├── StorageError              the server could not store it
│   │   ├── NamespaceFullError    a namespace has used up its room there
│   │   ├── NamespaceGoneError    the cluster does not have the namespace
│   │   └── StorageTimeoutError   a TimeoutError: the server did not say in time whether it could
│   ├── ObjectTooLargeError       a ValueError
│   └── PayloadLostError          an object lay in the memory of a process that has ended, or was freed
├── ClusterError
│   ├── NoClusterError            no cluster is named, and none may be started here
│   ├── NoTaskError               this process is not a task of a job
│   ├── ForkedError               a RuntimeError: the object's connection belongs to the process that was forked
│   ├── ClusterStartError         a local cluster did not come up
│   ├── WorkspaceError            a ValueError: a job's folder cannot be packed as it is
│   ├── JobNotFoundError          no job has that id
│   ├── StackError                where a task is in its code is not known
│   ├── WorkerNotFoundError       no worker of that name answers
│   ├── JobRefusedError           the cluster did not take the job; `accepted` are those launched with it that it took
│   │   └── QuotaExceededError    the quota of its namespace has no room for it
│   ├── JobFailedError            a job ended otherwise than well; `info` tells how
│   ├── JobResultError            a job succeeded, but what it returned cannot be had
│   └── JobTimeoutError           a TimeoutError: the job had not ended in time, and goes on
└── ActorError
    ├── ActorNotFoundError        that name is not served; the call was not delivered to anyone
    ├── ActorDeadlockError        an actor would wait for a call to itself for ever; the call was not run
    ├── ActorNameTakenError       that name is served already
    ├── ActorDiedError            the actor ended while the call was out: it may have run
    │   ├── ActorGivenUpError     it failed more often than it may be restarted; the call was not run
    │   ├── NotRunError           the actor ended before it ran the call: it may be sent again
    │   └── PoisonedTaskError     each worker that a task was given to has died of it
    ├── ActorFailedError          raised by an actor's own method: its instance is of no use any more
    ├── ActorTimeoutError         a TimeoutError: no answer in time; the call may run, or have run
    ├── ConnectionLostError       the bus was lost while the call was out: it may have run
    ├── InvalidArgumentsError     a TypeError: the method does not take the arguments of a call in JSON; it was not run
    ├── MailboxFullError          the actor has too much waiting; the call was not run
    ├── SupersededError           this instance is not the one behind its name any more: another has taken its place
    └── RemoteError               an exception at the actor that could not be sent as itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fluster_bus.core.errors import (
    AddressError,
    BusError,
    BusyError,
    ClosedError,
    ConnectError,
    CredentialsError,
    DisconnectedError,
    FlusterError,
    InvalidMessageError,
    InvalidNameError,
    MessageTooLargeError,
    NamespaceFullError,
    NamespaceGoneError,
    NoAddressError,
    NoRespondersError,
    ObjectTooLargeError,
    PayloadLostError,
    RequestTimeoutError,
    ServiceError,
    StorageError,
    StorageTimeoutError,
    UntrustedServerError,
    WireVersionError,
)

if TYPE_CHECKING:
    from fluster_bus.messages import JobId, JobInfo

__all__ = [
    "ActorDeadlockError",
    "ActorDiedError",
    "ActorError",
    "ActorFailedError",
    "ActorGivenUpError",
    "ActorNameTakenError",
    "ActorNotFoundError",
    "ActorTimeoutError",
    "AddressError",
    "BusError",
    "BusyError",
    "ClosedError",
    "ClusterError",
    "ClusterStartError",
    "ConnectError",
    "ConnectionLostError",
    "CredentialsError",
    "DisconnectedError",
    "FlusterError",
    "ForkedError",
    "InvalidArgumentsError",
    "InvalidMessageError",
    "InvalidNameError",
    "JobFailedError",
    "JobNotFoundError",
    "JobRefusedError",
    "JobResultError",
    "JobTimeoutError",
    "MailboxFullError",
    "MessageTooLargeError",
    "NamespaceFullError",
    "NamespaceGoneError",
    "NoAddressError",
    "NoClusterError",
    "NoRespondersError",
    "NoTaskError",
    "NotRunError",
    "ObjectTooLargeError",
    "PayloadLostError",
    "PoisonedTaskError",
    "QuotaExceededError",
    "RemoteError",
    "RequestTimeoutError",
    "ServiceError",
    "StackError",
    "StorageError",
    "StorageTimeoutError",
    "SupersededError",
    "UntrustedServerError",
    "WireVersionError",
    "WorkerNotFoundError",
    "WorkspaceError",
]


class ClusterError(FlusterError):
    """Something about jobs, or about the cluster that runs them."""


class NoClusterError(ClusterError):
    """No cluster is named, or none answers there."""


class NoTaskError(ClusterError):
    """This process is not a task of a job."""


class ForkedError(ClusterError, RuntimeError):
    """The cluster object, or the pool, belongs to the process that was forked: a child makes its own."""


class ClusterStartError(ClusterError):
    """A local cluster did not come up."""


class WorkspaceError(ClusterError, ValueError):
    """The folder that a job is to run in cannot be packed: too large, or it holds what cannot travel."""


class JobNotFoundError(ClusterError, LookupError):
    """No job has that id."""


class StackError(ClusterError):
    """Where a task is in its code is not known: it does not run, or its worker cannot read its processes."""


class WorkerNotFoundError(ClusterError, LookupError):
    """No worker of that name answers."""


class JobRefusedError(ClusterError):
    """The cluster did not take the job. Nothing of it was started.

    Of those that one `launch_many` launched, `accepted` are the ids of the jobs that it did take, in order: they go on.
    """

    def __init__(self, message: str, accepted: Sequence[JobId] = ()) -> None:
        super().__init__(f"{message}; these were accepted and go on: {', '.join(accepted)}" if accepted else message)
        self.accepted: tuple[JobId, ...] = tuple(accepted)
        self._message = message

    def __reduce__(self) -> tuple[type[JobRefusedError], tuple[str, tuple[JobId, ...]]]:
        return type(self), (self._message, self.accepted)


class QuotaExceededError(JobRefusedError):
    """The namespace's quota has no room for the job: it needs more than the quota ever allows, or too many jobs
    wait.
    """


class JobFailedError(ClusterError):
    """A job ended otherwise than well; `info` is how it ended."""

    def __init__(self, info: JobInfo) -> None:
        reason = f": {info.error_message}" if info.error_message else ""
        super().__init__(f"job {info.job_id} ended as {info.status}{reason}")
        self.info = info

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[JobInfo]]:
        return type(self), (self.info,)


class JobResultError(ClusterError):
    """The job succeeded, but what it returned cannot be had: it is too large, cannot be pickled, or is gone by now."""


class JobTimeoutError(ClusterError, TimeoutError):
    """The job had not ended in time. It goes on."""


class ActorError(FlusterError):
    """Something about actors, pools and the calls to them."""


class ActorNotFoundError(ActorError, LookupError):
    """That name is not served. The call was not delivered to anyone."""


class ActorNameTakenError(ActorError):
    """That name is served already."""


class ActorDeadlockError(ActorError):
    """An actor that runs one call at a time would wait, without end, for a call to itself. It was not run."""


class ActorDiedError(ActorError):
    """The actor ended while the call was out. Whether the call was run is not known."""


class ActorGivenUpError(ActorDiedError):
    """The actor failed more often than it may be restarted. The message tells how it failed last."""

    is_final_failure = True  # of the task that it was


class ActorFailedError(ActorError):
    """Raise it in a method of an actor to say that the instance is of no use any more: the actor is made anew."""


class NotRunError(ActorDiedError):
    """The call was not run, and may be made again: the actor ended before, or had calls that were made later
    already.
    """


class PoisonedTaskError(ActorDiedError):
    """Each worker that the task was given to has died, the last with nothing else to do: it is not tried again."""


class ActorTimeoutError(ActorError, TimeoutError):
    """No answer came in time. The call may still run, or have run."""


class ConnectionLostError(ActorError, ConnectionError):
    """The connection to the bus was lost while the call was out: whether it was run is not known. Or it was lost for
    longer than a wait has patience for, or the cluster has ended: what was waited for may go on.
    """


class InvalidArgumentsError(ActorError, TypeError):
    """The arguments of a call in JSON are not what the method takes. It was not run."""


class SupersededError(ActorError):
    """Another instance has taken this one's place behind their name: it saves nothing and answers nothing any more."""

    is_final_failure = True  # of the task that it was


class MailboxFullError(ActorError):
    """The actor has too many calls waiting. This one was not run: send it again later."""


class RemoteError(ActorError):
    """An exception at the actor that could not be sent as itself: its type, message and traceback, as text."""

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str, str]]:
        return type(self), (self.type_name, self.message, self.traceback)
