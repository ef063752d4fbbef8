"""Controllers by the dozen: forked, with everything imported, so that many can be killed in little time.

They share the clock of "controllers", if that is one of `Daemons.clocks`.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from fluster_services.controller.controller import ControllerConfig
from tests.system.daemons import CLOCKS, DEFAULT, Daemons

_PROGRAM = f"""{CLOCKS}
from fluster_services.controller.__main__ import run_controller
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("", flush=True)
for line in sys.stdin:
    config, log_file = pickle.loads(base64.b64decode(line))
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run_controller(config, log_file=Path(log_file))
        os._exit(0)
    print(pid, flush=True)
"""


class Nursery:
    """The controllers of a cluster by name, killed and started again."""

    def __init__(self, daemons: Daemons) -> None:
        from fluster_bus.core.roles import Role

        self._daemons = daemons
        self._address = daemons.server.credentials(Role.SERVICE)
        self.running: dict[str, int] = {}  # {name: pid}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=daemons.family.environment(
                PYTHONPATH=os.pathsep.join(sys.path), **daemons.clock_environment("controllers")
            ),
        )
        self._read_line()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for name in list(self.running):
                self.kill(name)
        finally:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.close()
            self._process.stdout.close()
            self._process.wait(60)

    def start(self, name: str) -> None:
        """Start a controller; it comes up by itself."""
        config = ControllerConfig(
            address=self._address, namespaces=(DEFAULT,), timing=self._daemons.timing, controller_id=name
        )
        request = base64.b64encode(pickle.dumps((config, self._daemons.folder / f"{name}.log")))
        assert self._process.stdin is not None
        self._process.stdin.write(request + b"\n")
        self._process.stdin.flush()
        self.running[name] = int(self._read_line())

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        try:
            os.kill(self.running[name], number)
        except ProcessLookupError:
            log = self._daemons.log(name)[-2000:]
            del self.running[name]
            raise AssertionError(f"{name} has ended by itself: {log}") from None
        if number is signal.SIGKILL:
            del self.running[name]
