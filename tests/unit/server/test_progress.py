"""Loading progress where there is no terminal: a log line now and then, not one per call."""

import logging

import pytest

from hotrack.server import progress


def test_log_lines_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    lines: list[str] = []
    monkeypatch.setattr(progress.log, "info", lambda text, *args: lines.append(text % args))
    with progress.LoadingBar() as bar:
        for step in range(100):
            now = 100.0 + step * 0.1
            bar.update("weights", step << 20, 100 << 20)
    assert lines == ["loading weights: 50.0 MiB (50%)"]
    assert logging.getLogger("hotrack.server.progress") is progress.log


def test_a_total_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY_S", 0.0)
    lines: list[str] = []
    monkeypatch.setattr(progress.log, "info", lambda text, *args: lines.append(text % args))
    with progress.LoadingBar() as bar:
        bar.update("download", 5 << 20, 0)
    assert lines == ["loading download: 5.0 MiB"]
