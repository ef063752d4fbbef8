"""An older release of Fluster, and processes that are all gone in the end."""

from tests.compat.releases import old  # noqa: F401 - a fixture
from tests.system.conftest import family  # noqa: F401 - a fixture
