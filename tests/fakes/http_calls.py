"""Calls an ASGI application directly, in whole requests: ``await call(app, "POST", "/v1/...", {...})``."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Parsed ``data:`` events; ``[DONE]`` as that string."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Call:
    """One request in flight. ``started``: the response has begun; ``hang_up()``: the client goes away."""

    def __init__(self, app: Any, method: str, url: str, body: bytes, headers: dict[str, str]) -> None:
        self.reply = Reply()
        self.started = asyncio.Event()
        self.body_reads = 0
        self._gone = asyncio.Event()
        self._parts = [body[i : i + 65536] for i in range(0, len(body), 65536)] or [b""]
        parts = urlsplit(url)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.get_running_loop().create_task(app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            self.body_reads += 1
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self.started.set()
        elif message.get("body"):
            self.reply.chunks.append(message["body"])
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.reply.complete = True


def start(app: Any, method: str, url: str, body: Any = b"", headers: dict[str, str] | None = None) -> Call:
    """Begin a request; a body that is not bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Call(app, method, url, raw, headers or {})


async def call(
    app: Any, method: str, url: str, body: Any = b"", headers: dict[str, str] | None = None
) -> Reply:
    """One request from beginning to end."""
    pending = start(app, method, url, body, headers)
    await asyncio.wait_for(pending.task, 10)
    return pending.reply


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until ``condition()`` holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never held")
