"""How far an engine is with pulling an image, by the steps that it tells. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluster_services.capacity import describe_bytes

_HERE = ("Already exists", "Pull complete")
_LOADED = ("Verifying Checksum", "Download complete", "Extracting", *_HERE)
_STATES = (
    "Pulling fs layer",
    "Waiting",
    "Retrying",
    "Downloading",
    *_LOADED,
)  # of a layer; what else is told has a tag as its id


class PullProgress:
    """The layers of one image. Of those whose download has not begun the sizes are not known."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._states: dict[str, str] = {}  # {layer: as the engine names it}
        self._loaded: dict[str, int] = {}  # {layer: bytes that are there}
        self._sizes: dict[str, int] = {}

    def on_step(self, step: Mapping[str, Any]) -> None:
        """The engine told a step."""
        layer, state = step.get("id"), str(step.get("status"))
        if layer is None or not state.startswith(_STATES):
            return
        self._states[layer] = state
        detail = step.get("progressDetail") or {}
        if state == "Downloading" and detail.get("total", 0) > 0:
            self._sizes[layer] = detail["total"]
            self._loaded[layer] = detail.get("current", 0)
        elif state.startswith(_LOADED):
            self._loaded[layer] = self._sizes.setdefault(layer, 0)

    def text(self) -> str:
        """One line about it."""
        count = len(self._states)
        here = sum(state.startswith(_HERE) for state in self._states.values())
        if not count:
            return f"pulling image {self._image}"
        layers = f"{here} of {count} layers are there"
        if all(state.startswith(_LOADED) for state in self._states.values()):
            return f"unpacking image {self._image}: {layers}"
        size = describe_bytes(sum(self._sizes.values()))
        most = size if len(self._sizes) == count else f"at least {size}"
        return f"pulling image {self._image}: {describe_bytes(sum(self._loaded.values()))} of {most}, {layers}"
