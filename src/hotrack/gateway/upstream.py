"""HTTP/1.1 client connections to members, over TCP or a Unix socket.

A small client of our own because it sits on the path of every token: responses are handed on in whatever
pieces the socket delivers, with no per-chunk task, timer or header object. Parsing is httptools'
(llhttp), so framing (length, chunked, close-delimited) is not ours to get wrong.

One ``MemberConnections`` per member keeps idle connections for reuse. All methods run on one event loop.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import cast

import httptools

MAX_HEADER_BYTES = 64 * 1024
HIGH_WATER_BYTES = 256 * 1024
CONNECT_TIMEOUT_S = 5.0
MAX_IDLE = 64

Headers = list[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The member did not answer properly. ``started``: part of a response had already arrived."""

    def __init__(self, message: str, *, connected: bool, started: bool = False) -> None:
        super().__init__(message)
        self.connected = connected
        self.started = started


@dataclass(frozen=True, slots=True)
class Address:
    """Where a member listens: ``uds`` wins over ``host`` and ``port``; ``path_prefix`` precedes paths."""

    host: str = "127.0.0.1"
    port: int = 0
    uds: str | None = None
    path_prefix: bytes = b""

    @property
    def authority(self) -> bytes:
        return b"localhost" if self.uds else f"{self.host}:{self.port}".encode()


class _Connection(asyncio.Protocol):
    """One connection carrying one exchange at a time. httptools calls the ``on_*`` methods."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.reused = False
        self.busy = False
        self.lost = False
        self._waiter: asyncio.Future[None] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget the previous exchange."""
        self.status = 0
        self.headers: Headers = []
        self.headers_done = False
        self.complete = False
        self.failure: BaseException | None = None
        self._header_bytes = 0
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._keep_alive = False

    # asyncio.Protocol
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        if not self.busy:  # bytes nobody asked for; never let them answer the next request
            self.fail(UpstreamError("unsolicited response", connected=True))
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(
                UpstreamError(f"malformed HTTP response: {error}", connected=True, started=self.headers_done)
            )
            return
        if not self.headers_done:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.fail(UpstreamError("response headers are too large", connected=True))
                return
        elif self._buffered > HIGH_WATER_BYTES and not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.complete and self.failure is None:
            if self.headers_done and self._close_delimited():
                self.complete = True
            else:
                reason = f": {exc}" if exc else ""
                self.failure = UpstreamError(
                    f"connection closed before the response ended{reason}",
                    connected=True,
                    started=self.headers_done,
                )
        self._wake()

    def _close_delimited(self) -> bool:
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # httptools callbacks
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:  # 100-continue and friends precede the real response
            self.headers = []
            return
        self.status = status
        self.headers_done = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        self.complete = self.headers_done
        self._keep_alive = bool(self.parser.should_keep_alive())  # only defined inside this callback

    # the exchange's side
    def fail(self, failure: BaseException) -> None:
        """End the exchange with ``failure`` (raised by the pending or next read) and drop the connection."""
        if self.failure is None:
            self.failure = failure
        if self.transport is not None:
            self.transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    @property
    def has_data(self) -> bool:
        return bool(self._chunks)

    def take(self) -> bytes:
        """Everything received and not yet handed on."""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self.transport is not None:
            self._paused = False
            self.transport.resume_reading()
        return data

    @property
    def reusable(self) -> bool:
        return self.complete and self._keep_alive and not self.lost and self.failure is None


class UpstreamResponse:
    """A response being received. Call ``close`` exactly once, whatever happened."""

    def __init__(self, pool: "MemberConnections", connection: _Connection) -> None:
        self._pool = pool
        self._connection = connection
        self.status = connection.status
        self.headers = connection.headers

    async def read(self) -> bytes:
        """The next piece of the body, as large as has arrived; ``b""`` at the end.

        Raises:
            UpstreamError: the member went away or broke the protocol (after handing on what had arrived).
            BaseException: whatever ``fail`` was given.
        """
        connection = self._connection
        while True:
            if connection.has_data:
                return connection.take()
            if connection.failure is not None:
                raise connection.failure
            if connection.complete:
                return b""
            await connection.wait()

    async def read_all(self, limit: int) -> tuple[bytes, bool]:
        """The body up to ``limit`` bytes or a little more, and whether that is all of it."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                return b"".join(pieces), False
        return b"".join(pieces), True

    def fail(self, failure: BaseException) -> None:
        """Make the pending read raise ``failure`` and hang up, which the member sees as an abort."""
        self._connection.fail(failure)

    def close(self) -> None:
        """Give the connection back, or hang up when the response was not read to its end."""
        self._pool.release(self._connection)


class MemberConnections:
    """Keep-alive connections to one member."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Connection] = []

    async def request(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> UpstreamResponse:
        """Send one request and wait for the response's headers, however long that takes.

        A kept-alive connection that turns out closed before a byte of response arrived is replaced once by a
        fresh one; nothing else is retried.

        Raises:
            UpstreamError: no connection, no answer, or a malformed one.
        """
        message = self._serialise(method, target, headers, body)
        while True:
            connection = self._take_idle() or await self._connect()
            try:
                return await self._exchange(connection, message)
            except UpstreamError as error:
                if error.started or not connection.reused:
                    raise

    async def _exchange(self, connection: _Connection, message: bytes) -> UpstreamResponse:
        assert connection.transport is not None
        connection.begin()
        connection.busy = True
        connection.transport.write(message)
        try:
            while not connection.headers_done:
                if connection.failure is not None:
                    raise connection.failure
                await connection.wait()
        except BaseException:
            connection.transport.abort()
            raise
        return UpstreamResponse(self, connection)

    def _serialise(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> bytes:
        lines = [
            method,
            b" ",
            self.address.path_prefix,
            target,
            b" HTTP/1.1\r\nhost: ",
            self.address.authority,
        ]
        for name, value in headers:
            lines += (b"\r\n", name, b": ", value)
        lines.append(b"\r\ncontent-length: %d\r\n\r\n" % len(body))
        lines.append(body)
        return b"".join(lines)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost and connection.failure is None:
                connection.reused = True
                return connection
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if address.uds is not None:
                    _, connection = await loop.create_unix_connection(_Connection, address.uds)
                else:
                    _, connection = await loop.create_connection(_Connection, address.host, address.port)
        except (OSError, TimeoutError) as error:
            where = address.uds or f"{address.host}:{address.port}"
            raise UpstreamError(
                f"cannot connect to {where}: {str(error) or 'timed out'}", connected=False
            ) from error
        return connection

    def release(self, connection: _Connection) -> None:
        if connection.reusable and len(self._idle) < MAX_IDLE:
            connection.begin()
            connection.busy = False
            self._idle.append(connection)
        elif connection.transport is not None:
            connection.transport.abort()

    def close(self) -> None:
        """Drop the idle connections."""
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.abort()
        self._idle.clear()
