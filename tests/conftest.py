import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Nothing is held to a time: other programs may be busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell ignores them for what it runs in the background, and so would every process that a test starts and interrupts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# A `fluster up` of the user of this machine does not concern the tests, nor the other way round.
_run_dir = tempfile.TemporaryDirectory(prefix="fluster_tests_")
os.environ["FLUSTER_RUN_DIR"] = _run_dir.name

# Fixtures that use the Docker engine of the session, some by asking for it as they run.
_ENGINE_FIXTURES = {"engine", "any_site", "docker_site", "either"}
_LONGEST_FIRST = ("engine", "test_compose")  # minutes each: what else there is runs beside them


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, as everything that talks to the bus does."""
    return "asyncio"


# First, as pytest-xdist reads the groups in a hook of its own.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep together what shares fixtures where pytest-xdist distributes tests over processes: the tests of a module, and
    all that need a Docker engine, since starting one and giving it images takes long."""
    if not hasattr(config, "workerinput"):  # a process that pytest-xdist started has it
        return
    with_engine = {item.path for item in items if _ENGINE_FIXTURES & set(getattr(item, "fixturenames", ()))}
    groups = {path: "engine" if path in with_engine else path.stem for path in {item.path for item in items}}
    for item in items:
        part = item.path.relative_to(Path(__file__).parent).parts[0]
        item.add_marker(pytest.mark.xdist_group(f"{part}/{groups[item.path]}"))
    ranks = {group: rank for rank, group in enumerate(_LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(groups[item.path], len(ranks)))
