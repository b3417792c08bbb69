"""What the run loop may do to the world. The loop decides; an ``Effects`` acts."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from hotrack.core.clock import Clock
from hotrack.core.errors import HotrackError
from hotrack.members.endpoint import Endpoint
from hotrack.pool.events import Event, EventLog, SwapRecord
from hotrack.pool.lease import Lease
from hotrack.pool.request import Request
from hotrack.pool.scheduler import Switch


class Effects(Protocol):
    """None of these blocks, fails or calls back into the run loop before it returns."""

    def grant(self, request: Request, endpoint: Endpoint) -> None: ...

    def refuse(self, request: Request, error: HotrackError) -> None: ...

    def conclude(self, request: Request, *, passed: bool) -> None:
        """A provisional grant became a real one, or its answer must be thrown away."""
        ...

    def abandon(self, request: Request) -> None:
        """Tell the holder that its answer must end now."""
        ...

    def run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> None:
        """Start the transition; ``RunLoop.on_switch_done`` is called once when it ended, however it ended.
        ``abort``: running requests were cut, so the engine must drop them."""
        ...

    def set_timer(self, when: float) -> None:
        """Call ``RunLoop.on_timer`` at that pool-clock second (inf: not); replaces the timer before."""
        ...

    def publish(self, event: Event) -> None: ...


class AsyncEffects:
    """Acts on an event loop. ``run_switch`` makes the coroutine of a transition."""

    def __init__(self, clock: Clock, events: EventLog) -> None:
        self._clock = clock
        self._events = events
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = float("inf")
        self._switch: asyncio.Task[None] | None = None
        self.on_timer: Callable[[], None]
        self.start_switch: Callable[[Switch, SwapRecord, bool], asyncio.Task[None]]

    def grant(self, request: Request, endpoint: Endpoint) -> None:
        assert isinstance(request, Lease)
        request.grant(endpoint)

    def refuse(self, request: Request, error: HotrackError) -> None:
        assert isinstance(request, Lease)
        request.refuse(error)

    def conclude(self, request: Request, *, passed: bool) -> None:
        assert isinstance(request, Lease)
        request.conclude(passed=passed)

    def abandon(self, request: Request) -> None:
        assert isinstance(request, Lease)
        request.abandon()

    def run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> None:
        self._switch = self.start_switch(switch, record, abort)

    def set_timer(self, when: float) -> None:
        if when == self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = when
        if when != float("inf"):
            self._timer = asyncio.get_running_loop().create_task(self._ring(when))

    def publish(self, event: Event) -> None:
        self._events.publish(event)

    async def close(self) -> None:
        """Cancel the timer and the running transition and wait for both."""
        tasks = [task for task in (self._timer, self._switch) if task is not None]
        self._timer = self._switch = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ring(self, when: float) -> None:
        await self._clock.sleep(max(0.0, when - self._clock.now()))
        self._timer = None  # so that the loop may set a new one from inside
        self._timer_at = float("inf")
        self.on_timer()
