"""What a streaming client hears while its model is being woken.

For the first seconds nothing is sent, so a refusal still has its real status code. After that the client
gets its 200 and an SSE comment now and then, which keeps proxies and read timeouts quiet; a failure then
becomes an SSE error event with the same code.
"""

import asyncio
from types import TracebackType

from hotrack.core.clock import Clock
from hotrack.gateway.request import Send
from hotrack.openai.sse import HEARTBEAT

PATIENCE_S = 10.0
HEARTBEAT_S = 5.0


class Heartbeats:
    """Async context manager around a wait; ``started`` tells whether the 200 was sent, be it before."""

    def __init__(
        self, send: Send, clock: Clock, headers: list[tuple[bytes, bytes]], *, started: bool = False
    ) -> None:
        self.started = started
        self._send = send
        self._clock = clock
        self._headers = headers
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Heartbeats":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        await self._clock.sleep(PATIENCE_S)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        if not self.started:
            head = {"type": "http.response.start", "status": 200, "headers": headers + self._headers}
            await self._send(head)
            self.started = True
        while True:
            await self._send({"type": "http.response.body", "body": HEARTBEAT, "more_body": True})
            await self._clock.sleep(HEARTBEAT_S)
