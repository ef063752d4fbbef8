"""What is read from JSON, before it is checked."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON, as `json.loads` returns it; its reader checks, or knows from its writer, what lies under which key."""
