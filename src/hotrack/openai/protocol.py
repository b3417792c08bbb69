"""HTTP/1.1 as uvicorn speaks it, with a bound on request heads (neither it nor its parser has one) and
OpenAI's error body for what is not HTTP."""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hotrack.core.errors import RequestError
from hotrack.openai.errors import error_json

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Answers 400 and closes when a request's head does not end within ``MAX_HEAD_BYTES``.

    The bound is checked after each read from the socket.
    """

    _in_head = True
    _head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"the request's headers are longer than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Also what uvicorn calls for a request that it cannot parse, with a text of its own."""
        body = error_json(RequestError(msg))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[400] + head + body)
        self.transport.close()
