"""What the hot path needs from a pool; ``hotrack.pool`` satisfies it by shape, tests with a fake."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from hotrack.members.endpoint import Endpoint


class Lease(Protocol):
    """The right to send one request to one awake member."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def provisional(self) -> bool:
        """The member is still being verified: the answer must wait for ``verified``."""
        ...

    @property
    def abandoned(self) -> asyncio.Event:
        """Set when the drain deadline passed: the request must end now."""
        ...

    async def verified(self) -> bool:
        """Wait until bytes of the answer may leave. False: they never may; ask for another lease."""
        ...

    def first_byte(self) -> None:
        """The first byte of the answer is here; called at most once."""
        ...

    def engine_dead(self, reason: str) -> None:
        """The member answered that its engine is gone."""
        ...


class Leases(Protocol):
    def lease(
        self, model: str, *, deadline_s: float | None, priority: int, request_id: str
    ) -> AbstractAsyncContextManager[Lease]:
        """Wait until ``model`` is awake and may take one more request.

        Raises (on entering): the typed errors of ``hotrack.core.errors``.
        """
        ...
