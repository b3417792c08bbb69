"""Loading progress: a bar on a terminal, a line now and then in a log."""

import sys
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hotrack.obs.log import get_logger

log = get_logger(__name__)
_LOG_EVERY_S = 5.0


class LoadingBar:
    """Context manager; ``update(stage, done, total)`` in bytes, from any thread."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
        self._tasks: dict[str, TaskID] = {}
        self._logged = monotonic()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        if self._bar is None:
            self._log(stage, done, total)
            return
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total or None)
        self._bar.update(self._tasks[stage], completed=done, total=total or None)

    def _log(self, stage: str, done: int, total: int) -> None:
        now = monotonic()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            share = f" ({done / total:.0%})" if total else ""
            log.info("loading %s: %.1f MiB%s", stage, done / 2**20, share)
