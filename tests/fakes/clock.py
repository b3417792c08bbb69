"""Virtual time: an event loop whose clock jumps to the next timer whenever nothing else can run.

Everything that asks asyncio for time (``sleep``, ``wait_for``, ``call_later``) follows, so hours pass in
milliseconds and in the same order on every run.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Nothing is scheduled any more, and the test still waits."""


class VirtualClock:
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise DeadlockError("nothing is scheduled and nothing can happen")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 1e5) -> T:
    """``asyncio.run`` on virtual time; ``limit_s`` virtual seconds at most."""

    async def bounded() -> T:
        return await asyncio.wait_for(main, limit_s)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())
