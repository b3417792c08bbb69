"""Writing responses: errors with their real status, error events, and pass-through of a member's bytes."""

from collections.abc import Callable

import msgspec

from hotrack.core.errors import EngineDeadError, HotrackError
from hotrack.gateway.request import Send
from hotrack.gateway.upstream import Headers, UpstreamResponse
from hotrack.openai.errors import error_headers, error_json, sse_error

BUFFERED_BYTES = 1024 * 1024
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


_error_body = msgspec.json.Decoder(_ErrorBody)


class Reply:
    """The response to one client. ``started`` once a status line is out; ``end``: the last piece of a
    forwarded body."""

    def __init__(self, send: Send, request_id: bytes) -> None:
        self.status = 0
        self.sse = False
        self.end = b""
        self._send = send
        self._request_id = request_id

    @property
    def started(self) -> bool:
        return self.status != 0

    def adopt_stream(self) -> None:
        """The 200 of an event stream is already out (heartbeats were sent)."""
        self.status, self.sse = 200, True

    async def error(self, error: HotrackError) -> None:
        """Status and body when nothing is out yet; the stream's last event (and no ``[DONE]``) otherwise.

        A plain body that is already half out cannot be repaired: returning without finishing it makes the
        server cut the connection, which is how HTTP says "incomplete".
        """
        if not self.started:
            headers = [(name.encode(), value.encode()) for name, value in error_headers(error).items()]
            await self.json(error.status, error_json(error), headers)
        elif self.sse:
            await self._send({"type": "http.response.body", "body": sse_error(error), "more_body": False})

    async def json(self, status: int, body: bytes, headers: Headers | None = None) -> None:
        await self._start(status, [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._request_id),
            *(headers or []),
        ])  # fmt: skip
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def forward(self, response: UpstreamResponse, first_byte: Callable[[], None]) -> None:
        """Pass a member's response on, byte for byte.

        Event streams flow as they arrive, in whole events, so that an error event can never land inside
        another one. Anything else is held until complete (up to 1 MiB), so that a member dying half way still
        gives the client a proper error status. ``first_byte`` is called when the body begins to arrive.
        """
        headers = self._headers(response)
        if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
            await self._forward_events(response, headers, first_byte)
            return
        body, complete = await response.read_all(BUFFERED_BYTES)
        self.end = body
        first_byte()
        if self.sse:  # the 200 is out already: the member's refusal becomes the stream's last event
            await self._send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + body.replace(b"\n", b" ") + b"\n\n",
                    "more_body": False,
                }
            )
            return
        await self._start(response.status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": not complete})
        if not complete:
            while piece := await response.read():
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _forward_events(
        self, response: UpstreamResponse, headers: Headers, first_byte: Callable[[], None]
    ) -> None:
        send = self._send
        if not self.started:
            self.sse = True
            # An error event may have to follow, so the length is not ours to promise.
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            await self._start(response.status, headers)
        tail = b""
        fresh = True
        while data := await response.read():
            if fresh:
                fresh = False
                first_byte()
            if tail:
                data = tail + data
                tail = b""
            if not data.endswith(b"\n\n"):
                cut = _last_boundary(data)
                data, tail = data[:cut], data[cut:]
                if not data:
                    continue
            self.end = data
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": tail, "more_body": False})

    def _headers(self, response: UpstreamResponse) -> Headers:
        headers = [
            pair for pair in response.headers if pair[0] not in HOP_BY_HOP and pair[0] != b"x-request-id"
        ]
        headers.append((b"x-request-id", self._request_id))
        return headers

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status


def engine_death(end: bytes) -> str | None:
    """The reason in the end of a member's answer that says that its engine is gone, as body or as last event;
    None for every other answer."""
    if EngineDeadError.code.encode() not in end:  # nearly always
        return None
    event = end.strip().rsplit(b"\n\n", 1)[-1].removeprefix(b"data:")
    try:
        error = _error_body.decode(event).error
    except msgspec.MsgspecError:
        return None  # an answer that speaks of it
    return (error.message or "its engine is dead") if error.code == EngineDeadError.code else None


def _last_boundary(data: bytes) -> int:
    """Index after the last complete event; everything when an event is absurdly long."""
    if len(data) > BUFFERED_BYTES:
        return len(data)
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
