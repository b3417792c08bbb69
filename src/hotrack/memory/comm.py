"""Memory that other processes or devices can see, and how to stop them from looking while it is gone.

Buffers that NCCL registered, symmetric memory and signal pads are *counted*: they are mapped for good,
because a peer may write to them at any time, and their bytes are part of what is left on the device asleep.
Regions that were *exported* (CUDA IPC, NIXL, RDMA) may be unmapped, but only after every peer has closed its
mapping: that keeps the physical memory alive, and after a wake it would still show the old memory.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hotrack.core.errors import SleepError, TransitionError, WakeError


@dataclass(frozen=True, slots=True)
class Export:
    """``close`` returns when no peer maps the memory any more; ``reopen`` when all of them do again. Both act
    for this rank alone; whoever registers them makes the ranks meet."""

    name: str
    close: Callable[[], None]
    reopen: Callable[[], None]


class CommRegion:
    """The ledger of one rank. Owned by whoever owns its transitions; no locks."""

    def __init__(self) -> None:
        self._counted: dict[str, int] = {}
        self._exports: dict[str, Export] = {}
        self._closed: list[Export] = []

    # -- counted memory

    @property
    def nbytes(self) -> int:
        """Bytes that stay on the device asleep."""
        return sum(self._counted.values())

    @property
    def counted(self) -> Mapping[str, int]:
        return dict(self._counted)

    def count(self, name: str, nbytes: int) -> None:
        """Memory under a new name."""
        assert nbytes >= 0, f"{name=} {nbytes=}"
        assert name not in self._counted, f"{name} is counted already"
        self._counted[name] = nbytes

    def uncount(self, name: str) -> int:
        """It is gone; returns what it was."""
        return self._counted.pop(name)

    # -- exports

    @property
    def exports_open(self) -> bool:
        """No export is closed."""
        return not self._closed

    def export(self, name: str, close: Callable[[], None], reopen: Callable[[], None]) -> None:
        """Peers can see a region under this name from now on. Not while exports are closed."""
        assert self.exports_open, f"{name} cannot be exported asleep"
        assert name not in self._exports, f"{name} is exported already"
        self._exports[name] = Export(name, close, reopen)

    def unexport(self, name: str) -> None:
        """Peers have let go of it for good; legal asleep, too."""
        export = self._exports.pop(name)
        if export in self._closed:
            self._closed.remove(export)

    def close_exports(self) -> None:
        """Before an unmap; in the order of registration. Closed already: nothing happens.

        Raises:
            SleepError: an export could not be closed; those that were are open again.
            TransitionError: opening them again failed as well; the process must be restarted.
        """
        for export in self._exports.values():
            if export in self._closed:
                continue
            with self._or_undo(export, "closing", SleepError, self._reopen_all):
                export.close()
                self._closed.append(export)

    def reopen_exports(self) -> None:
        """After a wake; in the reverse order. Open already: nothing happens.

        Raises:
            WakeError: an export could not be opened; all of them are closed.
            TransitionError: closing them again failed as well; the process must be restarted.
        """
        opened: list[Export] = []

        def close_again() -> None:
            for export in reversed(opened):
                export.close()
                self._closed.append(export)

        while self._closed:
            export = self._closed[-1]
            with self._or_undo(export, "reopening", WakeError, close_again):
                export.reopen()
            opened.append(self._closed.pop())

    def _reopen_all(self) -> None:
        while self._closed:
            self._closed[-1].reopen()
            self._closed.pop()

    @contextmanager
    def _or_undo(
        self, export: Export, doing: str, kind: type[SleepError | WakeError], undo: Callable[[], None]
    ) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            message = f"{doing} export '{export.name}': {error}"
            try:
                undo()
            except Exception as undoing:
                raise TransitionError(
                    f"{message}; undoing it failed as well: {undoing}. The engine must be restarted",
                    code="memory_failed",
                ) from undoing
            if not isinstance(error, Exception):
                raise
            raise kind(message) from error
