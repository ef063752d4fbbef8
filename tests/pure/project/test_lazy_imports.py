"""What is imported while a cluster comes up."""

from __future__ import annotations

import pytest

from fluster_bus.core import lazy_imports


def test_what_could_not_be_imported_is_not_taken_for_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_imports, "_later", [])
    lazy_imports.import_later("json", "fluster.nowhere")
    for _ in range(2):  # as with two clusters that are started in two threads, of which one has begun with it
        with pytest.raises(ModuleNotFoundError, match=r"fluster\.nowhere"):
            lazy_imports.import_now()
