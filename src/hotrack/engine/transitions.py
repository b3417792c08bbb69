"""Sleep and wake over all ranks of an engine: every rank changes, or none does.

Called at a frame boundary with nothing in flight, so the ranks' collectives match up.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from hotrack.core.errors import HotrackError, SleepError, TransitionError, WakeError
from hotrack.core.lifecycle import SleepLevel
from hotrack.memory.kept import KeptRange
from hotrack.memory.reports import SleepReport, WakeReport

Agree = Callable[[int], int]


class Memory(Protocol):
    """The part of ``memory.MemoryManager`` that moves. A call that raises has changed nothing."""

    @property
    def sleeping_tags(self) -> tuple[str, ...]: ...

    @property
    def missing_bytes(self) -> dict[str, int]: ...

    @property
    def is_landing(self) -> bool: ...

    def sleep(
        self, level: int, *, nbytes: int | None = None, keep: Sequence[KeptRange] = ()
    ) -> SleepReport: ...

    def wake(self, tags: Collection[str] | None = None, *, streamed: bool = False) -> WakeReport: ...

    def wait_for(self, names: Sequence[str]) -> None: ...

    def finish_wake(self) -> WakeReport: ...


class Transitions:
    """``agree`` is the minimum over ranks (identity for one rank). ``before_sleep`` gives back what lies
    outside of the memory's regions."""

    def __init__(
        self,
        memory: Memory,
        agree: Agree = lambda value: value,
        before_sleep: Callable[[], None] = lambda: None,
    ) -> None:
        self._memory = memory
        self._agree = agree
        self._before_sleep = before_sleep
        self._level = SleepLevel.PAUSE
        self._keep: Sequence[KeptRange] = ()
        self._back: Callable[[], object] = _nothing

    @property
    def is_sleeping(self) -> bool:
        return bool(self._memory.sleeping_tags)

    def sleep(
        self, level: SleepLevel, nbytes: int | None = None, keep: Sequence[KeptRange] = ()
    ) -> dict[str, Any]:
        """This rank's report as plain data. Asleep already: the memory manager decides what is left to do.

        ``nbytes``: only so much of this rank's device; ``keep``: what running requests need of the KV cache.

        Raises:
            SleepError: some rank could not; all are awake as before, and ``keep`` holds what it held.
        """
        undo = _nothing if self.is_sleeping else self._memory.wake
        self._before_sleep()
        report = self._on_all_ranks(
            lambda: self._memory.sleep(level, nbytes=nbytes, keep=keep), undo, SleepError
        )
        self._level, self._keep = level, keep
        return self._describe(report)

    def wake(self, tags: Collection[str] | None) -> dict[str, Any]:
        """This rank's report as plain data. ``tags`` None wakes everything.

        Raises:
            WakeError: some rank could not; all are asleep.
        """
        if not self.is_sleeping:
            return self._describe(self._memory.wake(tags))
        return self._describe(
            self._on_all_ranks(lambda: self._memory.wake(tags), self._way_back(), WakeError)
        )

    def start_wake(self) -> dict[str, Any]:
        """Wake everything, but return while the weights are still on their way: until ``finish_wake``, steps
        must call ``wait_for`` before they read a weight, and nothing they compute may leave the process.

        Raises:
            WakeError: some rank could not; all are asleep.
        """
        if not self.is_sleeping:
            return self._describe(self._memory.wake())
        self._back = self._way_back()
        return self._describe(
            self._on_all_ranks(lambda: self._memory.wake(streamed=True), self._back, WakeError)
        )

    @property
    def is_landing(self) -> bool:
        """Bytes of a streamed wake are on their way, or not yet verified."""
        return self._memory.is_landing

    def wait_for(self, names: Sequence[str]) -> None:
        """Makes the device wait until these weights have landed."""
        self._memory.wait_for(names)

    def finish_wake(self) -> dict[str, Any]:
        """The second half of ``start_wake``: every byte has landed and is the one that was saved.

        Raises:
            WakeError: not so on some rank; all are asleep.
        """
        return self._describe(self._on_all_ranks(self._memory.finish_wake, self._back, WakeError))

    def _way_back(self) -> Callable[[], object]:
        """Puts to sleep again what is asleep now."""
        level, keep = self._level, self._keep
        missing = sum(self._memory.missing_bytes.values())
        nbytes = missing if level is SleepLevel.KEEP_WEIGHTS else None
        return lambda: self._memory.sleep(level, nbytes=nbytes, keep=keep)

    def _on_all_ranks(
        self, act: Callable[[], Any], undo: Callable[[], object], error: type[TransitionError]
    ) -> SleepReport | WakeReport:
        failure: HotrackError | None = None
        report = None
        try:
            report = act()
        except HotrackError as exc:
            failure = exc
        if self._agree(failure is None):
            assert report is not None
            return report
        if failure is not None:
            raise failure
        undo()
        raise error("another rank failed, so this one was put back; see that rank's log")

    def _describe(self, report: SleepReport | WakeReport) -> dict[str, Any]:
        tags = self._memory.sleeping_tags
        return {
            **asdict(report),
            "is_sleeping": bool(tags),
            "sleeping_tags": list(tags),
            "missing_bytes": self._memory.missing_bytes,
        }


def _nothing() -> None:
    return None
