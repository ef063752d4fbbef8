"""What kinds of objects are kept in streams of their own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class ObjectKind:
    """Objects that have a stream of their own, so that those of another kind never take their room."""

    name: str
    kept_s: int
    is_shared: bool = True  # else each is its writer's alone, and is stored whatever is there

    @property
    def shown_time(self) -> str:
        days, hours = divmod(self.kept_s // 3_600, 24)
        return f"{days} days" if days else f"{hours} hours"

    @property
    def renewed_after(self) -> timedelta:
        """What is put again later than this is stored anew."""
        return timedelta(seconds=self.kept_s / 4)


BUNDLES = ObjectKind("bundles", 7 * 86_400)
PAYLOADS = ObjectKind("payloads", 4 * 3_600)
REQUESTS = ObjectKind("requests", 7 * 86_400, is_shared=False)  # of jobs that wait to be recorded
