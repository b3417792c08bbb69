"""Sleep and wake of one engine's memory: model hooks, the memory manager, and agreement over ranks.

Called at a frame boundary with nothing in flight. All-or-nothing over ranks: if one rank fails, the others
undo.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, is_dataclass
from time import monotonic
from typing import Any, Protocol

from hotrack.core.errors import HotrackError, SleepError, TransitionError, WakeError
from hotrack.core.lifecycle import SleepLevel

Agree = Callable[[int], int]
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)


class Memory(Protocol):
    """What transitions need of the memory manager. Reports are dataclasses."""

    def sleep(self, level: SleepLevel) -> object: ...

    def wake(self, tags: Sequence[str] | None = None) -> object: ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def sleeping_tags(self) -> Collection[str]: ...


class ModelHooks(Protocol):
    """Copies of the weights that a model makes for itself (prepacked for oneDNN)."""

    def before_sleep(self) -> None: ...

    def after_wake(self) -> None: ...


class Transitions:
    """``reload_weights`` fills the weights from the checkpoint again (after level 2). ``agree``: min over
    ranks.
    """

    def __init__(
        self,
        memory: Memory,
        model: ModelHooks,
        reload_weights: Callable[[], None],
        agree: Agree = lambda value: value,
    ) -> None:
        self.memory = memory
        self.model = model
        self.level: SleepLevel | None = None
        self._reload_weights = reload_weights
        self._agree = agree
        self._packed = True

    @property
    def is_sleeping(self) -> bool:
        return self.memory.is_sleeping

    def sleep(self, level: SleepLevel) -> dict[str, Any]:
        """Release memory. A second call changes nothing.

        Raises:
            SleepError: this or another rank failed; memory is as before.
        """
        if self.level is not None:
            return self._describe(None, 0.0)
        start = monotonic()
        report = self._on_all_ranks(lambda: self._release(level), self._restore, SleepError, "sleep")
        self.level = level
        return self._describe(report, monotonic() - start)

    def wake(self, tags: Sequence[str] | None) -> dict[str, Any]:
        """Bring memory back, all of it or the named ``tags``. Awake already: changes nothing.

        Raises:
            WakeError: this or another rank failed; everything is asleep.
        """
        if self.level is None:
            return self._describe(None, 0.0)
        start, level = monotonic(), self.level
        report = self._on_all_ranks(
            lambda: self._restore(tags), lambda: self._release(level), WakeError, "wake"
        )
        if not self.is_sleeping:
            self.level = None
        return self._describe(report, monotonic() - start)

    def _release(self, level: SleepLevel) -> object:
        if self._packed:
            self.model.before_sleep()
            self._packed = False
        return self.memory.sleep(level)

    def _restore(self, tags: Sequence[str] | None = None) -> object:
        dropped = self.level is SleepLevel.DROP_WEIGHTS and WEIGHTS in self.memory.sleeping_tags
        report = self.memory.wake(tags)
        if WEIGHTS not in self.memory.sleeping_tags and not self._packed:
            if dropped:
                self._reload_weights()
            self.model.after_wake()
            self._packed = True
        return report

    def _on_all_ranks(
        self,
        act: Callable[[], object],
        undo: Callable[[], object],
        error: type[TransitionError],
        verb: str,
    ) -> object:
        failure: HotrackError | MemoryError | OSError | None = None
        report: object = None
        try:
            report = act()
        except (HotrackError, MemoryError, OSError) as exc:
            failure = exc
        if self._agree(failure is None):
            return report
        if failure is None:
            undo()
            raise error(f"another rank failed to {verb}; this rank was put back. See that rank's log.")
        if isinstance(failure, TransitionError):
            raise failure
        undo()
        raise error(f"could not {verb}: {failure}") from failure

    def _describe(self, report: object, seconds: float) -> dict[str, Any]:
        fields = asdict(report) if is_dataclass(report) and not isinstance(report, type) else {}
        return {
            **fields,
            "is_sleeping": self.is_sleeping,
            "sleeping_tags": sorted(self.memory.sleeping_tags),
            "level": self.level,
            "seconds": seconds,
        }
