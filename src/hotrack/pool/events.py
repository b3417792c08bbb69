"""What happened in a pool: typed events, a bounded history and live subscriptions."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from enum import StrEnum

from hotrack.core.lifecycle import MemberState


class Cause(StrEnum):
    """Why the pool acted."""

    BOOT = "boot"
    REQUEST = "request"  # its device was free, or its holder idle
    QUANTUM = "quantum"  # the holder used up its turn
    MAX_WAIT = "max_wait"
    PRIORITY = "priority"
    DEADLINE = "deadline"  # min_residency was cut short to keep a deadline
    RESTORE = "restore"  # a failed wake gives the device back
    RESTART = "restart"
    IDLE = "idle"
    PROBE = "probe"  # a member stopped answering; its process is ended
    OPERATOR = "operator"


FOR_WAITERS = frozenset(
    {Cause.REQUEST, Cause.QUANTUM, Cause.MAX_WAIT, Cause.PRIORITY, Cause.DEADLINE, Cause.OPERATOR}
)


@dataclass(frozen=True, slots=True)
class StateChanged:
    """One row of the state machine. ``time`` in seconds of the pool's clock, like every event's."""

    time: float
    member: str
    old: MemberState
    new: MemberState
    reason: str = ""


@dataclass(slots=True)
class SwapRecord:
    """One transition of a device group, with what it cost.

    ``victims`` gave their memory back, ``target`` (None: only a sleep) took it. Byte counts are measured, of
    the first victim around its sleep and of the target around its wake; None = not measured. ``result``:
    'ok', 'cancelled' or an error code. ``first_token_ms``: from ready to the first byte of the first request
    served, filled in when it happens.
    """

    number: int
    time: float
    cause: Cause
    target: str | None
    victims: tuple[str, ...] = ()
    request_id: str = ""
    result: str = "ok"
    error: str = ""
    drain_ms: float = 0.0
    sleep_ms: float = 0.0
    start_ms: float = 0.0
    wake_ms: float = 0.0
    verify_ms: float = 0.0
    first_token_ms: float | None = None
    victim_bytes_before: int | None = None
    victim_bytes_after: int | None = None
    target_bytes_before: int | None = None
    target_bytes_after: int | None = None
    streamed: bool = False  # the last wake answered before its weights had arrived
    canary: str = ""  # a CanaryRan result, '' when it did not run

    @property
    def total_ms(self) -> float:
        return self.drain_ms + self.sleep_ms + self.start_ms + self.wake_ms + self.verify_ms


@dataclass(frozen=True, slots=True)
class SwapDone:
    time: float
    swap: SwapRecord


@dataclass(frozen=True, slots=True)
class FirstByte:
    """The first byte served after a swap; ``swap.first_token_ms`` is now known."""

    time: float
    swap: SwapRecord


@dataclass(frozen=True, slots=True)
class CanaryRan:
    """``result``: 'recorded', 'identical', 'mismatch', 'error'. ``evidence`` is what an operator needs after
    a mismatch.
    """

    time: float
    member: str
    result: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class RequestsCut:
    """A drain deadline passed: ``count`` running requests were ended with ``drain_timeout``."""

    time: float
    member: str
    count: int


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """A request that had to queue got its lease."""

    time: float
    member: str
    request_id: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class RequestRefused:
    time: float
    member: str
    request_id: str
    code: str


@dataclass(frozen=True, slots=True)
class MemoryMeasured:
    """``kind``: 'awake', 'residue', or 'partial' for a sleeper that could give back more."""

    time: float
    member: str
    kind: str
    num_bytes: int


Event = (
    StateChanged
    | SwapDone
    | FirstByte
    | CanaryRan
    | RequestsCut
    | RequestAdmitted
    | RequestRefused
    | MemoryMeasured
)
Listener = Callable[[Event], None]


class EventLog:
    """Bounded history with listeners (called at once, must not block) and asynchronous subscribers.

    A subscriber that falls more than ``backlog`` events behind loses the oldest ones: the pool never waits
    for it.
    """

    def __init__(self, history: int = 1000, backlog: int = 1000) -> None:
        self._history: deque[Event] = deque(maxlen=history)
        self._listeners: list[Listener] = []
        self._queues: set[asyncio.Queue[Event]] = set()
        self._backlog = backlog

    def publish(self, event: Event) -> None:
        self._history.append(event)
        for listener in self._listeners:
            listener(event)
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def history(self) -> list[Event]:
        return list(self._history)

    def swaps(self) -> list[SwapRecord]:
        """Finished swaps in the history, oldest first."""
        return [event.swap for event in self._history if isinstance(event, SwapDone)]

    async def subscribe(self) -> AsyncIterator[Event]:
        """Events from now on, for as long as the caller iterates."""
        queue: asyncio.Queue[Event] = asyncio.Queue(self._backlog)
        self._queues.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)
