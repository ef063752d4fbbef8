"""What a class says about itself as an actor: its options, its methods and theirs."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast, overload

from fluster.actors.definition.context import ActorContext
from fluster.actors.protocol.flow_control import Window
from fluster.actors.protocol.frames import CODECS, PICKLE
from fluster_bus.core.names import check_name, near

if TYPE_CHECKING:
    from fluster_bus.messages import EnvironmentConfig, ResourceConfig

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., object])
Options = TypeVar("Options", "ActorOptions", "MethodOptions")

# Methods that Fluster itself calls.
ON_START, ON_STOP, ON_FAILURE, ON_RESTORE = "on_start", "on_stop", "on_failure", "on_restore"
HOOKS = frozenset({ON_START, ON_STOP, ON_FAILURE, ON_RESTORE})

MAX_CONCURRENCY = 1_000
MAX_RETRIES = 1_000_000
MAX_RESTARTS = 1_000
MAX_STREAM_WINDOW, MAX_STREAM_WINDOW_BYTES = 1_000_000, 1 << 30
_ACTOR_MARK, _METHOD_MARK = "__fluster_actor__", "__fluster_method__"
_CONTEXT_PARAMETER = "ctx"


@dataclass(frozen=True)
class ActorOptions:
    """What `@actor(…)` takes."""

    name: str | None = None
    """The name under which it is deployed. Default: the class's name."""
    resources: ResourceConfig | None = None
    """What each actor takes. Default: no CPU and 256 MiB of memory."""
    environment: EnvironmentConfig | None = None
    """The environment of the job: workspace, packages, variables, image."""
    max_concurrency: int = 1
    """How many calls run at the same time; 1 runs them in the order in which they were sent."""
    timeout: float | None = None
    """In seconds, of calls that name no timeout themselves."""
    mailbox_calls: int = 10_000
    """How many calls may wait; more are answered with MailboxFullError."""
    mailbox_bytes: int = 64 << 20
    """How many bytes of arguments may wait."""
    concurrency_groups: Mapping[str, int] = field(default_factory=dict[str, int])
    """{group: how many calls of its methods run at the same time}; each group has a mailbox of its own."""
    max_restarts: int = 0
    """How often an actor that died or failed is restarted within `restart_window`."""
    restart_window: float = 60.0
    """In seconds."""
    fatal_exceptions: tuple[type[Exception], ...] = ()
    """Exceptions that make the actor fail when a method raises them."""
    singleton: bool = False
    """Have one live instance behind the name; another takes over only when that one has ended."""
    durable: bool = False
    """A singleton whose calls are stored until they are handled, and whose state can be saved."""
    codec: str = PICKLE
    """With "json", nothing that a caller sends is unpickled, nor what the actor answers."""

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name("actor name", self.name)
        if self.resources is not None:
            check_resources(self.resources)
        check_environment(self.environment)
        _check_count("max_concurrency", self.max_concurrency, MAX_CONCURRENCY, least=1)
        if not isinstance(self.concurrency_groups, Mapping):
            raise TypeError(f"concurrency_groups={self.concurrency_groups!r}: give a dict, such as {{'io': 2}}")
        for group, at_once in self.concurrency_groups.items():
            option = f"concurrency_groups[{check_name('concurrency group', group)!r}]"
            _check_count(option, at_once, MAX_CONCURRENCY, least=1)
        for limit in ("mailbox_calls", "mailbox_bytes"):
            if not isinstance(getattr(self, limit), int) or getattr(self, limit) < 1:
                raise ValueError(f"{limit}={getattr(self, limit)!r}: give a number from 1 on")
        _check_count("max_restarts", self.max_restarts, MAX_RESTARTS)
        if isinstance(self.restart_window, bool) or not isinstance(self.restart_window, int | float):
            raise TypeError(f"restart_window={self.restart_window!r}: give a number of seconds")
        if not 0 < self.restart_window < math.inf:
            raise ValueError(f"restart_window={self.restart_window!r}: give a number of seconds above 0")
        check_exceptions("fatal_exceptions", self.fatal_exceptions)
        if self.codec not in CODECS:
            raise ValueError(f"codec={self.codec!r}: give {' or '.join(repr(each) for each in CODECS)}")
        check_timeout(self.timeout)
        for option in ("singleton", "durable"):
            if not isinstance(getattr(self, option), bool):
                raise TypeError(f"{option}={getattr(self, option)!r}: give True or False")
        if self.durable:
            self._check_durable()

    def _check_durable(self) -> None:
        if self.max_concurrency != 1 or self.concurrency_groups:
            option = "concurrency_groups" if self.concurrency_groups else f"max_concurrency={self.max_concurrency}"
            raise ValueError(f"durable=True with {option}: its calls are handled in order, so one at a time")
        if self.codec != PICKLE:
            raise ValueError(f"durable=True with codec={self.codec!r}: stored calls are pickled")

    @property
    def has_seat(self) -> bool:
        """Whether there is one live instance behind a name."""
        return self.singleton or self.durable


@dataclass(frozen=True)
class MethodOptions:
    """What `@method(…)` takes."""

    timeout: float | None = None
    """In seconds, of calls that name no timeout themselves."""
    retries: int = 0
    """How often a call whose delivery failed is sent again: it may then run more than once."""
    retry_exceptions: tuple[type[Exception], ...] = ()
    """Exceptions of the method itself after which a call is retried as well."""
    concurrency_group: str | None = None
    """One of the class's `concurrency_groups`."""
    stream_window: int = 256
    """How many items a generator may be ahead of its reader."""
    stream_window_bytes: int = 4 << 20
    """How many bytes it may be ahead, beside one item."""

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        _check_count("retries", self.retries, MAX_RETRIES)
        check_exceptions("retry_exceptions", self.retry_exceptions)
        if self.retry_exceptions and not self.retries:
            raise ValueError("retry_exceptions needs retries=…: without it no call is sent again")
        _check_count("stream_window", self.stream_window, MAX_STREAM_WINDOW, least=1)
        _check_count("stream_window_bytes", self.stream_window_bytes, MAX_STREAM_WINDOW_BYTES, least=1)


@dataclass(frozen=True)
class MethodInfo:
    """A method that can be called from outside."""

    name: str
    is_async: bool
    takes_context: bool
    timeout: float | None
    retries: int
    retry_exceptions: tuple[type[Exception], ...]
    concurrency_group: str | None
    signature: str
    doc: str
    window: Window | None = None  # of a generator: how far it may be ahead of its reader


def _check_count(option: str, value: object, most: int, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{option}={value!r}: give a number from {least} to {most}")


def check_resources(resources: object) -> ResourceConfig:
    """Return `resources` if it is a ResourceConfig. Raises TypeError."""
    from fluster_bus.messages import ResourceConfig

    if not isinstance(resources, ResourceConfig):
        raise TypeError(f"resources={resources!r}: give a ResourceConfig, such as ResourceConfig.with_cpu(1)")
    return resources


def check_environment(environment: object) -> EnvironmentConfig | None:
    """Return `environment` if it is an EnvironmentConfig, or None. Raises TypeError."""
    if environment is None:
        return None
    from fluster_bus.messages import EnvironmentConfig

    if not isinstance(environment, EnvironmentConfig):
        raise TypeError(f"environment={environment!r}: give an EnvironmentConfig, as create_environment() makes it")
    return environment


def check_timeout(timeout: float | None) -> float | None:
    """Return `timeout` if it can be one. Raises ValueError, TypeError."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: give seconds as a number, or None to wait without end")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give a number of seconds above 0, or None to wait without end")
    return timeout


def check_exceptions(option: str, classes: tuple[type[Exception], ...]) -> None:
    """Raise TypeError for anything but classes of exceptions."""
    if not isinstance(classes, tuple) or not all(
        isinstance(cls, type) and issubclass(cls, Exception) for cls in classes
    ):
        raise TypeError(f"{option}={classes!r}: give a tuple of classes of exceptions, such as (OSError,)")


class ActorKeywords(TypedDict, total=False):
    """The keywords of `@actor(…)`, each a field of ActorOptions, where it is described."""

    name: str | None
    resources: ResourceConfig | None
    environment: EnvironmentConfig | None
    max_concurrency: int
    timeout: float | None
    mailbox_calls: int
    mailbox_bytes: int
    concurrency_groups: Mapping[str, int]
    max_restarts: int
    restart_window: float
    fatal_exceptions: tuple[type[Exception], ...]
    singleton: bool
    durable: bool
    codec: str


class MethodKeywords(TypedDict, total=False):
    """The keywords of `@method(…)`, each a field of MethodOptions, where it is described."""

    timeout: float | None
    retries: int
    retry_exceptions: tuple[type[Exception], ...]
    concurrency_group: str | None
    stream_window: int
    stream_window_bytes: int


def _options(kind: str, options_type: type[Options], options: Mapping[str, Any]) -> Options:
    known = [field.name for field in dataclasses.fields(options_type)]
    for name in options:
        if name not in known:
            raise TypeError(f"@{kind} has no option {name!r}{near(name, known)}")
    return options_type(**options)


@overload
def actor(cls: C, /) -> C: ...
@overload
def actor(cls: None = None, /, **options: Unpack[ActorKeywords]) -> Callable[[C], C]: ...
def actor(cls: C | None = None, /, **options: Unpack[ActorKeywords]) -> C | Callable[[C], C]:
    """Give a class options for its life as an actor. What is not given is as the class's base has it, else the default.

    The options are the fields of ActorOptions: name, resources, environment, max_concurrency, timeout, mailbox_calls,
    mailbox_bytes, concurrency_groups, max_restarts, restart_window, fatal_exceptions, singleton, durable, codec. Raises TypeError for any
    other, and above anything but a class.
    """
    _options("actor", ActorOptions, options)

    def mark(marked: C) -> C:
        if not isinstance(marked, type):
            raise TypeError(f"@actor stands above a class, not above {marked!r}")
        setattr(marked, _ACTOR_MARK, dataclasses.replace(options_of(marked), **options))
        return marked

    return mark if cls is None else mark(cls)


@overload
def method(function: F, /) -> F: ...
@overload
def method(function: None = None, /, **options: Unpack[MethodKeywords]) -> Callable[[F], F]: ...
def method(function: F | None = None, /, **options: Unpack[MethodKeywords]) -> F | Callable[[F], F]:
    """Give a method of an actor options of its own: the fields of MethodOptions.

    timeout (seconds), retries, retry_exceptions, concurrency_group, stream_window (items), stream_window_bytes.
    Raises TypeError for any other.
    """
    chosen = _options("method", MethodOptions, options)

    def mark(marked: F) -> F:
        if not callable(marked) or isinstance(marked, type):
            raise TypeError(f"@method stands above a method of a class, not above {marked!r}")
        if marked.__name__.startswith("_"):
            raise TypeError(f"@method above {marked.__name__!r}: names with a leading underscore are not callable")
        setattr(marked, _METHOD_MARK, chosen)
        return marked

    return mark if function is None else mark(function)


def options_of(cls: type) -> ActorOptions:
    """The options of a class, inherited ones too; only its name is its own."""
    options: ActorOptions = getattr(cls, _ACTOR_MARK, ActorOptions())
    return options if _ACTOR_MARK in vars(cls) else dataclasses.replace(options, name=None)


def resources_of(cls: type) -> ResourceConfig:
    """What each actor of a class takes: no CPU unless it says so, as it mostly waits."""
    from fluster_bus.messages import ResourceConfig

    return options_of(cls).resources or ResourceConfig(cpu=0, memory=256 << 20)


def name_of(cls: type) -> str:
    """The name under which a class is deployed unless told otherwise."""
    return check_name("actor name", options_of(cls).name or cls.__name__)


def methods_of(cls: type) -> dict[str, MethodInfo]:
    """The methods of a class that can be called from outside: those without a leading underscore."""
    found: dict[str, MethodInfo] = {}
    for name in dir(cls):
        if name.startswith("_") or name in HOOKS:
            continue
        function = _function(inspect.getattr_static(cls, name))
        if callable(function) and not isinstance(function, type):
            found[name] = method_of(cls, name)
    return found


def method_of(cls: type, name: str) -> MethodInfo:
    """What is known of one method of a class. Raises ValueError when it is in a group that the class does not have."""
    attribute, options = inspect.getattr_static(cls, name), options_of(cls)
    info = _method_info(name, attribute, _function(attribute), options.timeout)
    group = info.concurrency_group
    if group is not None and group not in options.concurrency_groups:
        raise ValueError(
            f"{cls.__name__}.{name} is in concurrency_group={group!r}, which its class does not have"
            f"{near(group, options.concurrency_groups)}: declare it with @actor(concurrency_groups={{{group!r}: 1}})"
        )
    if options.durable and info.window is not None:
        raise ValueError(
            f"{cls.__name__}.{name} is a generator, and its class is durable: a stored call may outlive the program "
            "that reads the items: return a list"
        )
    if options.durable and info.retries:
        raise ValueError(
            f"{cls.__name__}.{name} has retries={info.retries}, and its class is durable: a stored call is run at least "
            "once by itself, and would be one more each time: leave them out"
        )
    return info


def _function(attribute: Any) -> Any:
    if isinstance(attribute, staticmethod | classmethod):
        return getattr(cast("object", attribute), "__func__", None)
    return attribute


def _method_info(name: str, attribute: Any, function: Callable[..., Any], default: float | None) -> MethodInfo:
    options = getattr(function, _METHOD_MARK, MethodOptions())
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C have none
        signature = inspect.Signature()
    parameters = list(signature.parameters.values())
    if not isinstance(attribute, staticmethod):
        parameters = parameters[1:]
    takes_context = bool(parameters) and is_context(parameters[0])
    plain = inspect.unwrap(function)
    is_stream = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    shown = signature.replace(parameters=parameters[1:] if takes_context else parameters)
    return MethodInfo(
        name=name,
        is_async=inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain),
        takes_context=takes_context,
        timeout=options.timeout if options.timeout is not None else default,
        retries=options.retries,
        retry_exceptions=options.retry_exceptions,
        concurrency_group=options.concurrency_group,
        signature=f"{name}{shown}",
        doc=inspect.getdoc(function) or "",
        window=Window(options.stream_window, options.stream_window_bytes) if is_stream else None,
    )


def is_context(parameter: inspect.Parameter) -> bool:
    """True for a parameter that is not the caller's: it is given the ActorContext."""
    annotation = parameter.annotation
    if isinstance(annotation, str):  # as `from __future__ import annotations` leaves it
        annotated = annotation.rpartition(".")[2] == ActorContext.__name__
    else:
        annotated = annotation is ActorContext
    by_position = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    return by_position and (annotated or parameter.name == _CONTEXT_PARAMETER)


def check_class(cls: object) -> type:
    """Return `cls` if it can be deployed. Raises TypeError, which tells what to do instead."""
    if isinstance(cls, type):
        return cls
    if callable(cls):
        raise TypeError(
            f"deploy() takes a class, not the function {cls!r}: use a WorkerPool to run functions, "
            "or put it into a class as a method"
        )
    kind = type(cls).__name__
    raise TypeError(
        f"deploy() takes a class, not the {kind} {cls!r}: write deploy(cluster, {kind}, …) with the arguments of its "
        "constructor, or serve this very object with ActorServer(cluster).register(name, instance)"
    )
