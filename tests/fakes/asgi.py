"""An ASGI client that sees what a socket would: status, headers, body pieces; it may hang up at any point."""

import asyncio
from typing import Any

Headers = list[tuple[bytes, bytes]]


class AsgiCall:
    """One request to ``app``. ``start()`` runs it as a task; ``hang_up()`` is the client going away."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: bytes = b"",
        *,
        method: str = "POST",
        headers: Headers | None = None,
        query: bytes = b"",
        pieces: list[bytes] | None = None,
    ) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[bytes] = []
        self.complete = False
        self.num_read = 0
        self._app = app
        self._incoming = pieces if pieces is not None else [body]
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self.scope: dict[str, Any] = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query,
            "headers": headers or [],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def start(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self.run())

    async def run(self) -> None:
        await self._app(self.scope, self._receive, self._send)

    def hang_up(self) -> None:
        self._gone.set()

    async def until(self, condition: Any) -> None:
        """Wait until ``condition(self)`` holds; checked whenever something arrives."""
        while not condition(self):
            self._news.clear()
            await self._news.wait()

    async def _receive(self) -> dict[str, Any]:
        if self.num_read < len(self._incoming):
            piece = self._incoming[self.num_read]
            self.num_read += 1
            return {"type": "http.request", "body": piece, "more_body": self.num_read < len(self._incoming)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            assert not self.status, "two responses to one request"
            self.status = message["status"]
            self.headers = dict(message["headers"])
        else:
            assert self.status, "a body without a status"
            assert not self.complete, "a body after the end"
            if message.get("body"):
                self.pieces.append(message["body"])
            self.complete = not message.get("more_body", False)
        self._news.set()
