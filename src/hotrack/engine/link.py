"""The server process's socket to rank 0 on an event loop, asyncio's or uvloop's (no torch)."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import zmq

TERM_S = 2.0


def end_context(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Its sockets are closed. libzmq was seen to wait for ever when the other end had closed first; whoever
    shuts down does not wait with it."""
    ending = threading.Thread(target=context.term, name="hotrack-zmq-end", daemon=True)
    ending.start()
    ending.join(TERM_S)


class RankSocket:
    """A PAIR socket whose messages go to ``on_message`` as they come. Use from ``loop`` only.

    ZeroMQ's descriptor tells only that the socket's state has changed, and any call on the socket may take
    that notice: after a notice everything is read, and after a send one looks again.
    """

    def __init__(
        self, endpoint: str, on_message: Callable[[bytes], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(endpoint)
        self._on_message = on_message
        self._loop = loop
        self._fd = int(self._socket.get(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        loop.call_soon(self._drain)  # the first notice may have come before the reader

    def send(self, data: bytes) -> None:
        """Never waits: there is no high-water mark. A rank that is gone is noticed elsewhere."""
        with suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)
            end_context(self._context)

    def _drain(self) -> None:
        try:
            while not self._socket.closed:
                try:
                    data = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_message(data)
        except BaseException:
            self._loop.call_soon(self._drain)  # one bad message does not hold up the others
            raise
