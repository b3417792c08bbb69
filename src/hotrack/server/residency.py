"""Whether this member takes requests: awake, asleep, draining or dead. The one owner of that state in the
server."""

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hotrack.core.errors import (
    DrainingError,
    EngineDeadError,
    HotrackError,
    ModelAsleepError,
    QueueFullError,
    RequestError,
)
from hotrack.core.heap import trim_heap
from hotrack.core.lifecycle import EngineState, SleepLevel, SleepMode
from hotrack.obs.log import get_logger
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.server.generation import Engine, Generation

log = get_logger(__name__)

WAKE_TAGS = ("weights", "kv_cache", "scheduling")


class Residency:
    """Admission, sleep and wake. Transitions run one at a time and are not undone by a client that hangs
    up."""

    def __init__(
        self, engine: Engine, metrics: MemberMetrics, *, sleep_enabled: bool, max_requests: int
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._sleep_enabled = sleep_enabled
        self._max_requests = max_requests
        self._turn = asyncio.Lock()
        self._live: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._transitions: set[asyncio.Task[Any]] = set()
        self.state = EngineState.AWAKE
        self.level = SleepLevel.PAUSE
        self.missing_bytes: dict[str, int] = {}
        self.dead: EngineDeadError | None = None
        self._before_wake = SleepLevel.PAUSE, self.missing_bytes
        engine.on_landed = self._landed

    @property
    def is_sleeping(self) -> bool:
        return self.state in (EngineState.ASLEEP, EngineState.WAKING)

    def check(self) -> None:
        """Raises the typed reason why a request cannot be taken now."""
        if self.dead is not None:
            raise self.dead
        if self._draining:
            raise DrainingError("the server is shutting down and takes no new requests", retry_after_s=5)
        if self.state is not EngineState.AWAKE:
            raise ModelAsleepError(
                f"the model is {self.state.value.replace('_', ' ')}; wake it with POST /wake_up and send "
                "the request again",
                retry_after_s=1,
            )
        if len(self._live) >= self._max_requests:
            raise QueueFullError(
                f"{len(self._live)} requests are running or waiting, as many as this server takes at once "
                "(--max-concurrent-requests); send the request again later",
                retry_after_s=1,
            )

    @contextmanager
    def admit(self, generation: Generation) -> Iterator[None]:
        """Hold the place of one response; raises like ``check``."""
        self.check()
        self._live.add(generation)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.discard(generation)
            if not self._live:
                self._idle.set()

    async def sleep(self, level: int, mode: str, nbytes: int | None = None) -> dict[str, Any]:
        """The engine's report. Asleep already (same or deeper level): a no-op of the engine's.

        ``nbytes``: give back only so much of each device, KV first.

        Raises:
            RequestError: level, mode or ``nbytes`` make no sense, or sleep mode is off.
            TransitionError: nothing changed.
        """
        if not self._sleep_enabled:
            raise RequestError(
                "sleep mode is off; start the server with --enable-sleep-mode", code="sleep_mode_off"
            )
        wanted = _member(SleepLevel, level, "level")
        how = _member(SleepMode, mode, "mode")
        if nbytes is not None and (wanted is not SleepLevel.KEEP_WEIGHTS or not 0 < nbytes < 1 << 63):
            raise RequestError(
                f"nbytes must be at least 1, and goes with level=1; got {nbytes} and level={level}",
                param="nbytes",
            )
        return await self._run(self._sleep(wanted, how, nbytes))

    async def wake(self, tags: Sequence[str] | None, *, streamed: bool = False) -> dict[str, Any]:
        """The engine's report. ``tags`` None wakes everything. ``streamed``: on a GPU, return while weights
        are on their way; requests may come, and their tokens leave when all weights are verified.

        Raises:
            RequestError: an unknown tag, or tags of a streamed wake.
            TransitionError: nothing changed.
        """
        for tag in tags or ():
            if tag not in WAKE_TAGS:
                raise RequestError(f"tags must be among {', '.join(WAKE_TAGS)}; got {tag!r}", param="tags")
        if streamed and tags:
            raise RequestError("a streamed wake brings everything back; leave out tags", param="streamed")
        return await self._run(self._wake(list(tags) if tags else None, streamed))

    async def reset_prefix_cache(self) -> bool:
        if self.dead is not None:
            raise self.dead
        result = await self._engine.control("reset_prefix_cache")
        return bool(result.get("success", True))

    def fail_all(self, error: HotrackError) -> None:
        for generation in tuple(self._live):
            generation.fail(error)

    def engine_died(self, error: EngineDeadError) -> None:
        self.dead = error
        self.state = EngineState.FAILED
        self.fail_all(error)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new and wait for what runs; False when ``timeout_s`` passed first."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def _run(self, transition: Any) -> dict[str, Any]:
        # Shielded: a transition ends in a state of its own, not where a client happened to hang up.
        task: asyncio.Task[dict[str, Any]] = asyncio.ensure_future(transition)
        self._transitions.add(task)
        task.add_done_callback(self._transitions.discard)
        return await asyncio.shield(task)

    async def _sleep(self, level: SleepLevel, mode: SleepMode, nbytes: int | None) -> dict[str, Any]:
        async with self._turn:
            if self.dead is not None:
                raise self.dead
            before = self.state
            if before is EngineState.AWAKE:
                self._enter(EngineState.FALLING_ASLEEP, level)
            try:
                with self._metrics.transition("sleep"):
                    partial = {} if nbytes is None else {"nbytes": nbytes}
                    report = await self._engine.control("sleep", level=int(level), mode=mode.value, **partial)
            except HotrackError:
                if self.state is EngineState.FALLING_ASLEEP:
                    self._enter(before, self.level)
                raise
            self._take("sleep", report)
            # An engine that is asleep already stays at its level; it says so in the report.
            reached = SleepLevel(report.get("level", level))
            if before is EngineState.ASLEEP:
                reached = max(reached, self.level)
            self._enter(EngineState.ASLEEP, reached)
            if report.get("device_after_bytes") is None:
                # Answers leave garbage and free heap here as well, and what stays counts as residue. Where a
                # GPU is what is shared it does not, and tens of milliseconds of every swap would go to it.
                gc.collect()
                trim_heap()
            return report

    async def _wake(self, tags: list[str] | None, streamed: bool) -> dict[str, Any]:
        async with self._turn:
            if self.dead is not None:
                raise self.dead
            before = self.state
            if before is EngineState.ASLEEP:
                self._enter(EngineState.WAKING, self.level)
                self._before_wake = self.level, self.missing_bytes
            try:
                with self._metrics.transition("wake"):
                    how = {"streamed": True} if streamed else {}
                    report = await self._engine.control("wake", tags=tags, **how)
            except HotrackError:
                self._enter(before, self.level)
                raise
            self._take("wake", report)
            if report["is_sleeping"]:
                self._enter(EngineState.ASLEEP, self.level)
            else:
                self._enter(EngineState.AWAKE, SleepLevel.PAUSE)
            return report

    def _landed(self, report: dict[str, Any], error: HotrackError | None) -> None:
        """A streamed wake is over. If it brought wrong bytes, the engine is as asleep as before it."""
        if error is None:
            self._metrics.report("wake", report)
            return
        log.error("the streamed wake failed: %s", error.message)
        level, self.missing_bytes = self._before_wake
        self._enter(EngineState.ASLEEP, level)

    def _take(self, operation: str, report: dict[str, Any]) -> None:
        self.missing_bytes = report.get("missing_bytes", {})
        self._metrics.report(operation, report)

    def _enter(self, state: EngineState, level: SleepLevel) -> None:
        if self.dead is None:
            self.state, self.level = state, level
            self._metrics.set_sleep_state(state, int(level))


def _member(kind: type[Any], value: Any, param: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in kind)
        raise RequestError(f"{param} must be one of {allowed}; got {value!r}", param=param) from None
