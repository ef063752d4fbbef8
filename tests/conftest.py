import os
import signal
import tempfile

import pytest
from hypothesis import settings

# Nothing is held to a time: other programs may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell ignores them for what it runs in the background, and so would every process that a test starts and interrupts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A `fluster up` of whoever works at this machine is none of the tests' business, nor the other way round.
_run_dir = tempfile.TemporaryDirectory(prefix="fluster_tests_")
os.environ["FLUSTER_RUN_DIR"] = _run_dir.name


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, as everything that talks to the bus does."""
    return "asyncio"
