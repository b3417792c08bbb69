"""The gateway's HTTP server: uvicorn with uvloop and httptools, bounded headers, no access log by default."""

from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Cuts a connection whose request head does not end within ``MAX_HEADER_BYTES``."""

    _head_bytes = 0
    _in_head = True

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The request's headers are too large.")


def uvicorn_config(app: Any, *, host: str, port: int, access_log: bool = False) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=access_log,
        log_level="warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
