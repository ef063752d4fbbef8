"""The attacker has the credentials of a client or a job of one namespace, and the source; the parts are those of the other tests."""

from tests.component.conftest import (  # noqa: F401 - fixtures
    bus,
    cluster,
    connect_bus,
    controller,
    namespace,
    own_server,
    shared_server,
    start_controller,
    start_worker,
)
