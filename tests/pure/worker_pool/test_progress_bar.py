"""The bar in a notebook's cell."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from fluster.worker_pool.progress import NotebookBar


class _Gone:
    """A cell's output whose kernel has ended."""

    def update(self, _bar: object) -> None:
        raise RuntimeError("the kernel is gone")


def test_a_bar_that_cannot_be_shown_does_not_stop_the_work_and_is_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(display)["display"] = lambda *_args, **_options: _Gone()
    vars(ipython)["display"] = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    bar = NotebookBar("squares", 2)
    with caplog.at_level(logging.DEBUG, logger="fluster.worker_pool.progress"):
        bar.advance(2)
        bar.stop()  # it is over, and not shown again
    [noted] = caplog.records
    assert (noted.levelno, noted.getMessage()) == (logging.DEBUG, "the bar of squares could not be shown")
    assert noted.exc_info is not None
    assert "the kernel is gone" in str(noted.exc_info[1])
