import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` run on asyncio, as everything that talks to the bus does."""
    return "asyncio"
