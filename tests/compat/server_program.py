"""A nats-server as a release configures it, until stdin ends; it prints its addresses as JSON. Run by the release that PYTHONPATH names."""

import json
import sys
from pathlib import Path

from fluster_bus.core.roles import DEFAULT_NAMESPACE, Role
from fluster_bus.server import EmbeddedServer


def main() -> None:
    with EmbeddedServer(Path(sys.argv[1])) as server:
        told = {
            str(role): server.credentials(role, DEFAULT_NAMESPACE if role.is_tenant else None).to_url()
            for role in (Role.SERVICE, Role.WORKER, Role.OPERATOR, Role.CLIENT, Role.JOB)
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
