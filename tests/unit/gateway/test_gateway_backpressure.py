"""A client that does not read must stop the member, not fill the gateway's memory."""

import asyncio
import json
from pathlib import Path
from typing import Any

from fakes.asgi import AsgiCall
from fakes.leases import FakeLeases
from fakes.raw_upstream import Exchange, raw_upstream
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes
from hotrack.gateway.upstream import HIGH_WATER_BYTES

PIECE = b"data: " + b"x" * 65_000 + b"\n\n"
NUM_PIECES = 200


class SlowClient(AsgiCall):
    """Takes the first piece of the body, then nothing until ``reading`` is set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reading = asyncio.Event()

    async def _send(self, message: dict[str, Any]) -> None:
        if self.pieces:
            await self.reading.wait()
        await super()._send(message)


def test_a_client_that_does_not_read_stops_the_member(tmp_path: Path) -> None:
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start_events()
        for _ in range(NUM_PIECES):
            await exchange.chunks(PIECE)
            sent += len(PIECE)
        await exchange.write(b"0\r\n\r\n")

    async def main() -> None:
        async with raw_upstream(tmp_path, script) as upstream:
            proxy = Proxy(FakeLeases(upstream.endpoint), Routes({"m": Route("m", "m")}, ["m"]))
            body = json.dumps({"model": "m", "stream": True}).encode()
            client = SlowClient(proxy, "/v1/chat/completions", body)
            task = client.start()
            before = -1
            while before != sent:  # until the member gets no further
                before = sent
                await asyncio.sleep(0.05)
            held = sent - len(client.body)
            assert held < HIGH_WATER_BYTES + 4 * 2**20, held  # ours, plus what sockets hold
            client.reading.set()
            await asyncio.wait_for(task, 10)
            assert client.body == PIECE * NUM_PIECES

    asyncio.run(main())
