"""Pools for gateway tests: always awake, or scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from hotrack.members.endpoint import Endpoint


@dataclass
class FakeLease:
    endpoint: Endpoint
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)
    on_first_byte: Callable[[], None] = lambda: None
    deaths: list[str] = field(default_factory=list)
    verdict: "asyncio.Future[bool] | None" = None

    @property
    def provisional(self) -> bool:
        return self.verdict is not None and not self.verdict.done()

    async def verified(self) -> bool:
        return True if self.verdict is None else await self.verdict

    def first_byte(self) -> None:
        self.on_first_byte()

    def engine_dead(self, reason: str) -> None:
        self.deaths.append(reason)


class FakeLeases:
    """Grants every lease once ``gate`` is set, or raises ``error()``. Counts what is held."""

    def __init__(self, endpoint: Endpoint, error: Callable[[], Exception] | None = None) -> None:
        self.endpoint = endpoint
        self.error = error
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: list[FakeLease] = []
        self.asked: list[dict[str, object]] = []
        self.num_released = 0
        self.num_withdrawn = 0
        self.first_bytes = 0
        self.deaths: list[str] = []  # what holders said of dead engines
        self.verdicts: list[asyncio.Future[bool]] = []  # of the next leases; later ones are verified at once

    @asynccontextmanager
    async def lease(
        self, model: str, *, deadline_s: float | None, priority: int, request_id: str
    ) -> AsyncIterator[FakeLease]:
        self.asked.append(
            {"model": model, "deadline_s": deadline_s, "priority": priority, "request_id": request_id}
        )
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_withdrawn += 1
            raise
        if self.error is not None:
            raise self.error()
        verdict = self.verdicts.pop(0) if self.verdicts else None
        lease = FakeLease(self.endpoint, on_first_byte=self._count_first_byte, deaths=self.deaths)
        lease.verdict = verdict
        self.held.append(lease)
        try:
            yield lease
        finally:
            self.held.remove(lease)
            self.num_released += 1

    def _count_first_byte(self) -> None:
        self.first_bytes += 1
