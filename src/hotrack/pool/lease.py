"""A lease: the right to send one request to a member, for as long as the ``async with`` block runs."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from hotrack.core.errors import HotrackError
from hotrack.members.endpoint import Endpoint
from hotrack.pool.request import Request, RequestState


class LeaseOwner(Protocol):
    """What a lease needs from the run loop that grants it. Every method decides at once and never blocks."""

    def on_request(self, request: Request) -> None: ...

    def on_cancel(self, request: Request) -> None: ...

    def on_served(self, request: Request) -> None: ...

    def on_first_byte(self, request: Request) -> None: ...

    def on_engine_dead(self, request: Request, reason: str) -> None: ...

    def estimate_s(self, member: str) -> float: ...


class Lease(Request):
    """``async with pool.lease(model) as lease: ... lease.endpoint``.

    Entering waits until the member is awake, verified and admits the request; leaving gives the place back,
    also when the block raised or was cancelled. While inside, no sleep is sent to the member's engine unless
    ``abandoned`` was set ``abort_grace_s`` before: then the holder must stop reading and end its answer with
    ``DrainTimeoutError``.

    Entering raises:
        UnavailableError: its ``code`` and ``retry_after_s`` say why and until when; subclasses
        QueueFullError,
            ModelAsleepError, ModelStartingError, WakeFailedError, InsufficientMemoryError,
            DeadlineExceededError, MemberFailedError, DrainingError.
    """

    __slots__ = ("_abandoned", "_error", "_future", "_owner", "_verdict", "endpoint")

    def __init__(
        self,
        owner: LeaseOwner,
        member: str,
        *,
        request_id: str,
        priority: int,
        arrived: float,
        deadline: float,
    ) -> None:
        super().__init__(member, request_id=request_id, priority=priority, arrived=arrived, deadline=deadline)
        self.endpoint = Endpoint("")
        self._owner = owner
        self._abandoned: asyncio.Event | None = None
        self._error: HotrackError | None = None
        self._future: asyncio.Future[None] | None = None
        self._verdict: asyncio.Future[bool] | None = None

    @property
    def abandoned(self) -> asyncio.Event:
        """Set when the drain deadline passed while this lease was held."""
        if self._abandoned is None:  # most requests end without anybody asking
            self._abandoned = asyncio.Event()
        return self._abandoned

    async def verified(self) -> bool:
        """Wait until bytes of the answer may leave: at once, except behind a wake whose weights are still on
        their way. False: that wake failed. The answer must be thrown away and the request sent again under a
        new lease."""
        return True if self._verdict is None else await self._verdict

    def first_byte(self) -> None:
        """Tell the pool that the first byte of the answer left; cheap, call it once."""
        if self.swap is not None:
            self._owner.on_first_byte(self)

    def engine_dead(self, reason: str) -> None:
        """Tell the pool that the member answered with ``engine_dead``."""
        self._owner.on_engine_dead(self, reason)

    def estimate_s(self) -> float:
        """Seconds until the member can admit a request, from measured swap times; 0 when it can now."""
        return self._owner.estimate_s(self.member)

    async def __aenter__(self) -> Self:
        self._owner.on_request(self)
        if self.state is RequestState.GRANTED:
            return self
        if self._error is not None:
            raise self._error
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        except asyncio.CancelledError:
            self._owner.on_cancel(self)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner.on_served(self)

    def grant(self, endpoint: Endpoint) -> None:
        """For the pool's effects: the request is admitted."""
        self.endpoint = endpoint
        if self.provisional:
            self._verdict = asyncio.get_running_loop().create_future()
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def conclude(self, *, passed: bool) -> None:
        """For the pool's effects: the member was verified, or will not be."""
        if self._verdict is not None and not self._verdict.done():
            self._verdict.set_result(passed)

    def refuse(self, error: HotrackError) -> None:
        """For the pool's effects: the request ends without being admitted."""
        if self._future is None:
            self._error = error
        elif not self._future.done():
            self._future.set_exception(error)

    def abandon(self) -> None:
        """For the pool's effects: the drain deadline passed."""
        self.abandoned.set()
