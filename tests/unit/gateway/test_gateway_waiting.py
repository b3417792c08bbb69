"""What a streaming client hears while it waits, on virtual time."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fakes.asgi import AsgiCall
from fakes.clock import VirtualClock, run_virtual
from fakes.leases import FakeLeases
from fakes.raw_upstream import Exchange, RawUpstream, raw_upstream
from hotrack.core.errors import DeadlineExceededError, WakeFailedError
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes
from hotrack.openai.sse import HEARTBEAT

CHAT = "/v1/chat/completions"
ROUTES = Routes({"m": Route("m", "m")}, ["m"])
STREAM = json.dumps({"model": "m", "stream": True}).encode()
PLAIN = json.dumps({"model": "m"}).encode()
Test = Callable[[Proxy, FakeLeases], Awaitable[Any]]


async def events(exchange: Exchange) -> None:
    await exchange.events(b"data: a\n\n", b"data: [DONE]\n\n")


def play(folder: Path, test: Test, script: Any = events) -> None:
    async def main() -> None:
        async with raw_upstream(folder, script) as upstream:
            await run(upstream)

    async def run(upstream: RawUpstream) -> None:
        pool = FakeLeases(upstream.endpoint)
        pool.gate.clear()
        await test(Proxy(pool, ROUTES, clock=VirtualClock()), pool)

    run_virtual(main())


def test_a_quick_grant_sends_no_heartbeat(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        call = AsgiCall(proxy, CHAT, STREAM)
        task = call.start()
        await asyncio.sleep(9.9)
        assert call.status == 0
        pool.gate.set()
        await task
        assert (call.status, call.body) == (200, b"data: a\n\ndata: [DONE]\n\n")

    play(tmp_path, test)


def test_heartbeats_start_after_ten_seconds_and_the_answer_follows(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        call = AsgiCall(proxy, CHAT, STREAM, headers=[(b"x-request-id", b"r7")])
        task = call.start()
        await asyncio.sleep(10.1)
        assert (call.status, call.pieces) == (200, [HEARTBEAT])
        assert call.headers[b"content-type"].startswith(b"text/event-stream")
        assert call.headers[b"x-request-id"] == b"r7"
        await asyncio.sleep(10)
        assert call.pieces == [HEARTBEAT] * 3
        pool.gate.set()
        await task
        assert call.body == HEARTBEAT * 3 + b"data: a\n\ndata: [DONE]\n\n"

    play(tmp_path, test)


def test_a_refusal_in_the_first_seconds_keeps_its_status(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        pool.error = lambda: DeadlineExceededError("too late")
        call = AsgiCall(proxy, CHAT, STREAM)
        task = call.start()
        await asyncio.sleep(9)
        pool.gate.set()
        await task
        assert call.status == 504
        assert json.loads(call.body)["error"]["code"] == "deadline_exceeded"

    play(tmp_path, test)


def test_a_later_refusal_is_an_error_event_with_the_same_code(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        pool.error = lambda: WakeFailedError("no memory")
        call = AsgiCall(proxy, CHAT, STREAM)
        task = call.start()
        await asyncio.sleep(11)
        pool.gate.set()
        await task
        assert (call.status, call.complete) == (200, True)
        last = call.body.removeprefix(HEARTBEAT)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "wake_failed"
        assert b"[DONE]" not in call.body

    play(tmp_path, test)


def test_a_plain_request_waits_for_its_real_status(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        pool.error = lambda: WakeFailedError("no memory", retry_after_s=4)
        call = AsgiCall(proxy, CHAT, PLAIN)
        task = call.start()
        await asyncio.sleep(60)
        assert call.status == 0
        pool.gate.set()
        await task
        assert (call.status, call.headers[b"Retry-After"]) == (503, b"4")

    play(tmp_path, test)


def test_a_member_refusing_after_heartbeats_becomes_the_last_event(tmp_path: Path) -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.json(
            b'{"error": {"message": "too long",\n "code": "context_length_exceeded"}}', "400 Bad Request"
        )

    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        call = AsgiCall(proxy, CHAT, STREAM)
        task = call.start()
        await asyncio.sleep(11)
        pool.gate.set()
        await task
        event = call.body.removeprefix(HEARTBEAT)
        assert event.count(b"\n") == 2
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "context_length_exceeded"

    play(tmp_path, test, refuse)


def test_a_client_leaving_during_heartbeats_withdraws(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases) -> None:
        call = AsgiCall(proxy, CHAT, STREAM)
        task = call.start()
        await asyncio.sleep(11)
        call.hang_up()
        await task
        assert pool.num_withdrawn == 1

    play(tmp_path, test)
