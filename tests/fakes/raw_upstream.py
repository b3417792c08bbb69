"""A member that answers with exactly the bytes a test dictates, over a Unix socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from hotrack.members.endpoint import Endpoint

Script = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request as the member saw it, and the means to answer."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self._writer = writer

    async def write(self, *pieces: bytes) -> None:
        """Each piece in a write of its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def events(self, *pieces: bytes) -> None:
        """A whole chunked event stream."""
        await self.start_events()
        await self.chunks(*pieces)
        await self.write(b"0\r\n\r\n")

    async def start_events(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunks(self, *pieces: bytes) -> None:
        await self.write(*(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece))

    async def json(self, body: bytes, status: str = "200 OK") -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        await self.write(head.encode() + body)

    def die(self) -> None:
        self._writer.transport.abort()


class RawUpstream:
    """Runs ``script`` once per request; ``exchanges`` and ``num_hung_up`` are what happened."""

    def __init__(self, path: Path, script: Script, *, watch: bool) -> None:
        self.endpoint = Endpoint.unix(path)
        self.script = script
        self.watch = watch
        self.exchanges: list[Exchange] = []
        self.num_connections = 0
        self.hung_up = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(
                    next(x.split(b":")[1] for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                )
                exchange = Exchange(head, await reader.readexactly(length), writer)
                self.exchanges.append(exchange)
                answer = asyncio.ensure_future(self.script(exchange))
                gone = asyncio.ensure_future(reader.read(1)) if self.watch else None
                if gone is None:
                    await answer
                    continue
                await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not answer.done():
                    answer.cancel()
                    self.hung_up.set()
                    return
                gone.cancel()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()
        finally:
            writer.close()


@asynccontextmanager
async def raw_upstream(folder: Path, script: Script, *, watch: bool = False) -> AsyncIterator[RawUpstream]:
    """``watch``: notice a hang-up while the script still runs (one request per connection then)."""
    upstream = RawUpstream(folder / "member.sock", script, watch=watch)
    server = await asyncio.start_unix_server(upstream.handle, upstream.endpoint.uds)
    try:
        yield upstream
    finally:
        server.close()
