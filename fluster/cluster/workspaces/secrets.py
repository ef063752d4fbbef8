"""Takes the secrets that jobs name to the cluster, beside their requests."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from fluster_bus.messages import JobRequest
from fluster_bus.storage.stored_messages import MAX_SECRETS_BYTES


def check_secrets(requests: Iterable[JobRequest]) -> None:
    """Raise ValueError when a variable that a job names as a secret is not set here, or all together are too large."""
    for request in requests:
        secrets_of(request)


def secrets_of(request: JobRequest) -> dict[str, str]:
    """{variable: value} of those that the job names, from this process's environment. Raises ValueError."""
    names = request.environment.secrets
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"secrets: {', '.join(missing)} not set in this program's environment: set the variable before the launch, or "
            "leave it out"
        )
    values = {name: os.environ[name] for name in names}
    size = len(json.dumps(values))
    if size > MAX_SECRETS_BYTES:
        raise ValueError(f"secrets: {size:,} bytes in all, over the limit of {MAX_SECRETS_BYTES:,}")
    return values
