"""A stub OpenAI upstream: constant answers as fast as a socket allows. Also runs as a process for benchmarks:
``python -m fakes.stub_openai (--port N | --uds PATH)``.
"""

import argparse
import asyncio
from typing import cast

import httptools
import uvloop

CHUNK = (
    b'data: {"id":"c","object":"chat.completion.chunk",'
    b'"choices":[{"index":0,"delta":{"content":"tok%d"}}]}\n\n'
)
CHUNKS = [CHUNK % i for i in range(64)]
STREAM = b"".join(CHUNKS) + b"data: [DONE]\n\n"
ANSWER = (
    b'{"id":"c","object":"chat.completion",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}'
)


class StubConnection(asyncio.Protocol):
    """Streams 64 separate writes when the body asks for ``"stream":true``, one JSON body otherwise."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self.parser = httptools.HttpRequestParser(self)
        self.body: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self.body)
        self.body.clear()
        if b'"stream":true' in body.replace(b" ", b""):
            asyncio.ensure_future(self.stream())  # noqa: RUF006
        else:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                % (len(ANSWER), ANSWER)
            )

    async def stream(self) -> None:
        write = self.transport.write
        write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in [*CHUNKS, b"data: [DONE]\n\n"]:
            write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await asyncio.sleep(0)  # one token per step, as an engine sends them
        write(b"0\r\n\r\n")


async def serve(port: int | None, uds: str | None) -> None:
    loop = asyncio.get_running_loop()
    if uds:
        server = await loop.create_unix_server(StubConnection, uds)
    else:
        server = await loop.create_server(StubConnection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--port", type=int)
    arguments.add_argument("--uds")
    options = arguments.parse_args()
    uvloop.run(serve(options.port, options.uds))
