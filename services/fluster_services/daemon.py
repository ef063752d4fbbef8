"""What every daemon does: connect, serve, tell that it is ready, and leave cleanly when asked or left alone."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fluster_bus.access.address import BusAddress
from fluster_bus.access.tls import plain_servers
from fluster_bus.connection.bus import Bus
from fluster_bus.core.errors import (
    AddressError,
    BusError,
    ConnectError,
    CredentialsError,
    DisconnectedError,
    FlusterError,
    NoRespondersError,
    RequestTimeoutError,
    StorageTimeoutError,
    StreamNotFoundError,
)
from fluster_bus.running.backoff import Backoff
from fluster_bus.running.coroutines import wait_set
from fluster_bus.running.event_loops import loop_factory
from fluster_services.cluster_files import open_private
from fluster_services.config import DaemonLogs

log = logging.getLogger(__name__)

_FIRST_CONNECT_PAUSE_S, _LAST_CONNECT_PAUSE_S = 0.02, 2.0
_SAY_WAITING_S = 30.0  # between two lines that say that the bus is waited for
_CERTIFICATE_SOON_S = 30 * 86_400.0
_PAUSE_BEFORE_START_OVER_S = 0.2
_LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ALIVE_VARIABLE = "FLUSTER_ALIVE_FILE"
_SIGN_OF_LIFE_S = 10.0


class StartOverError(FlusterError):
    """What was served ended here: it is to be served anew, on a new connection."""


# A connection that is lost in the middle of a step leaves it half done; so does a server that is slow to answer, and a group of servers that
# elects who leads a stream: nothing listens on its subjects meanwhile.
_WORTH_A_START = (
    StartOverError,
    DisconnectedError,
    NoRespondersError,
    RequestTimeoutError,
    StorageTimeoutError,
    StreamNotFoundError,
)


def address_from_environment() -> BusAddress:
    """Where the environment says that the bus is; ends this process with one line when it does not."""
    try:
        return BusAddress.from_environment()
    except AddressError as error:
        sys.exit(str(error))


def run_daemon(
    serve: Callable[[Bus, Callable[[], None]], Coroutine[object, None, None]],
    *,
    address: BusAddress,
    name: str,
    ready_fd: int | None = None,
    owner_fd: int | None = None,
    log_file: Path | None = None,
    log_bytes: int = DaemonLogs.file_bytes,
    on_leave: Callable[[], None] | None = None,
) -> None:
    """Run `serve(bus, ready)` until it returns, SIGTERM, Ctrl-C, or the end of the pipe `owner_fd`: its owner is gone.

    With `on_leave` the first signal only calls that, for `serve` to return in its own time; a second one ends it at
    once, with the status that a shell gives to a program that died of the signal.
    When it raises StartOverError, or the error of a step that a lost connection, a slow store or an election among servers leaves half
    done, it is called again with another connection. A byte is written to `ready_fd` when `serve` calls `ready` for the first time. From then on
    the file that FLUSTER_ALIVE_FILE names, if it does, is touched as long as this daemon hears itself over the bus. Exits
    with status 1 and one line when it cannot go on.
    """
    _set_up_logging(log_file, log_bytes)
    if plain := plain_servers(address.servers):
        log.warning(
            "connections to %s are not encrypted: who is on the network can read and change all that is sent, credentials too; give the "
            "server a certificate, and address it by tls://",
            ", ".join(plain),
        )
    status = 1
    try:
        with _told_in(log_file, name), asyncio.Runner(loop_factory=loop_factory()) as runner:
            status = runner.run(_main(serve, address, name, ready_fd=ready_fd, owner_fd=owner_fd, on_leave=on_leave))
    except* FlusterError as errors:
        for error in _single(errors):
            log.error("%s", error)  # noqa: TRY400 - the reason is in the message; a traceback would hide it
    if status:  # not in the handler: Python 3.11 would wrap it into a group, and tell that
        sys.exit(status)


def _set_up_logging(log_file: Path | None, max_bytes: int) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if log_file is not None:
        handler = _PrivateLog(log_file, maxBytes=max_bytes, backupCount=1)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=text, handlers=[handler], force=True)


class _PrivateLog(RotatingFileHandler):
    """Only its owner can read it: it has what tenants' requests said."""

    def _open(self) -> TextIOWrapper:
        file = open(self.baseFilename, "ab", opener=open_private)  # noqa: SIM115 - the handler closes it
        # Written whatever is in it: a request's text need not be text.
        return TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")


@contextmanager
def _told_in(log_file: Path | None, name: str) -> Iterator[None]:
    """Have the log say which error ends this process, if it is one that was not foreseen; stderr has it in any case."""
    try:
        yield
    except Exception as error:
        group = error if isinstance(error, ExceptionGroup) else ExceptionGroup(name, [error])
        _, unforeseen = group.split(FlusterError)
        if log_file is not None and unforeseen is not None:
            log.critical("%s ends because of an error", name, exc_info=error)
        raise


def _single(errors: BaseExceptionGroup[FlusterError]) -> Iterator[FlusterError]:
    """The errors in a group, and in the groups in it."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _single(error)
        else:
            yield error


async def _main(
    serve: Callable[[Bus, Callable[[], None]], Coroutine[object, None, None]],
    address: BusAddress,
    name: str,
    *,
    ready_fd: int | None,
    owner_fd: int | None,
    on_leave: Callable[[], None] | None,
) -> int:
    loop = asyncio.get_running_loop()
    leaving = asyncio.Event()
    asked: list[int] = []  # the signals, in their order
    serving: asyncio.Task[None] | None = None

    def on_signal(number: int) -> None:
        asked.append(number)
        if on_leave is None or serving is None or len(asked) > 1:
            leaving.set()
        else:
            on_leave()

    for number in _LEAVE_SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    if owner_fd is not None:
        loop.add_reader(owner_fd, leaving.set)  # nothing is ever written there: it can only end
    ready_fds = [ready_fd] if ready_fd is not None else []
    is_ready = asyncio.Event()
    alive_path = alive_file()

    def ready() -> None:
        is_ready.set()
        while ready_fds:
            descriptor = ready_fds.pop()
            os.write(descriptor, b"\n")
            os.close(descriptor)
        log.info("%s is ready at %s", name, address)  # a reader of the log may count on what is above

    addresses = [address]
    while (bus := await connect(addresses, name, leaving)) is not None:
        serving = asyncio.create_task(serve(bus, ready))
        lost = asyncio.Event()
        bus.on_end(lost.set)  # by the server's word, as when these credentials are revoked: the next connect tells
        leave, gone = asyncio.create_task(leaving.wait()), asyncio.create_task(lost.wait())
        signs = asyncio.create_task(show_life(bus, is_ready, alive_path))
        over = True
        try:
            await asyncio.wait({serving, leave, gone}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving
            over = serving.done() or leave.done()
        except* _WORTH_A_START as errors:
            over = False
            for error in _single(errors):
                log.warning("starting over: %s", error)
        finally:
            tasks = (serving, leave, gone, signs)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            addresses[1:] = [bus.group_address]  # that of a server may have gone meanwhile
            await bus.close()
        if over:
            break
        await asyncio.sleep(_PAUSE_BEFORE_START_OVER_S)
    log.info("%s has left", name)
    return 128 + asked[-1] if on_leave is not None and len(asked) > 1 else 0


def alive_file() -> Path | None:
    """The file that a supervisor of this daemon looks at; absent until it is ready."""
    if not os.environ.get(_ALIVE_VARIABLE):
        return None
    file = Path(os.environ[_ALIVE_VARIABLE])
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: %s cannot be written: %s", _ALIVE_VARIABLE, file, error.strerror)
    return file


async def show_life(bus: Bus, is_ready: asyncio.Event, file: Path | None) -> None:
    """Touch `file` now and then, as long as the bus brings back what is sent."""
    await is_ready.wait()
    while file is not None:
        try:
            await bus.flush()
            file.touch()  # noqa: ASYNC240 - one call, of an inode that is there
        except (BusError, OSError) as error:
            log.warning("no sign of life: %s", error)
        await asyncio.sleep(_SIGN_OF_LIFE_S)


async def connect(addresses: Sequence[BusAddress], name: str, leaving: asyncio.Event) -> Bus | None:
    """A connection, tried at one of the addresses after the other, however long servers take to come up.

    None when asked to leave meanwhile.
    """
    waits, say_at, backoff = False, 0.0, Backoff(_FIRST_CONNECT_PAUSE_S, _LAST_CONNECT_PAUSE_S)
    for address in itertools.cycle(addresses):
        if leaving.is_set():
            break
        try:
            bus = await Bus.connect(address, name=name)
        except CredentialsError as error:
            raise _RefusedError(str(error)) from error
        except ConnectError as error:
            if time.monotonic() >= say_at:
                log.warning("%s waits for the bus, and tries again each few seconds: %s", name, error)
                say_at = time.monotonic() + _SAY_WAITING_S
            waits = True
        else:
            if waits:
                log.info("%s has reached the bus", name)
            bus.on_reconnect(functools.partial(_warn_of_end, bus))
            _warn_of_end(bus)
            return bus
        await wait_set(leaving, backoff.pause_s * random.uniform(0.5, 1))  # so that not all daemons come at once
        backoff.lengthen()
    return None


def _warn_of_end(bus: Bus) -> None:
    end = bus.certificate_end()
    if end is not None and end < time.time() + _CERTIFICATE_SOON_S:
        log.warning(
            "the certificate of the server ends on %s, and then all connections to it are refused: renew it, as by `fluster credentials certificates "
            "--renew`, and have the server read it",
            time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end)),
        )


class _RefusedError(FlusterError):
    """Wrong credentials stay wrong: it is not tried again."""
