"""Requests that a member computes before its wake is verified: nothing leaves before that, and nothing of a
wake that failed leaves at all."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fakes.asgi import AsgiCall
from fakes.leases import FakeLeases
from fakes.raw_upstream import Exchange, RawUpstream, Script, raw_upstream
from hotrack.core.errors import WakeFailedError
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes

ROUTES = Routes({"m": Route("m", "m")}, ["m"])
EVENT = b'data: {"text": "hello"}\n\n'


class Play:
    """A call on its way; its first lease is provisional, ``verdict`` ends that."""

    def __init__(self, upstream: RawUpstream, *, stream: bool) -> None:
        self.upstream = upstream
        self.pool = FakeLeases(upstream.endpoint)
        self.verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.pool.verdicts = [self.verdict]
        body = json.dumps({"model": "m", "stream": stream}).encode()
        headers = [(b"x-hotrack-deadline-s", b"50")]
        self.call = AsgiCall(Proxy(self.pool, ROUTES), "/v1/chat/completions", body, headers=headers)
        self.running = self.call.start()

    async def asked(self, count: int) -> None:
        """The member has seen ``count`` requests, and had time to answer."""
        while len(self.upstream.exchanges) < count:  # noqa: ASYNC110 - a plain attribute of a fake
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)

    def silent(self) -> bool:
        return not (self.call.status or self.call.pieces or self.pool.first_bytes)


def play(
    folder: Path,
    script: Script,
    test: Callable[[Play], Awaitable[None]],
    *,
    stream: bool = False,
    watch: bool = False,
) -> None:
    async def main() -> None:
        async with raw_upstream(folder, script, watch=watch) as upstream:
            await asyncio.wait_for(test(Play(upstream, stream=stream)), 10)

    asyncio.run(main())


async def events(exchange: Exchange) -> None:
    await exchange.events(EVENT, b"data: [DONE]\n\n")


async def plain(exchange: Exchange) -> None:
    await exchange.json(b'{"ok": true}')


@pytest.mark.parametrize(("stream", "script"), [(False, plain), (True, events)])
def test_the_member_works_and_the_client_hears_nothing_before_it_is_verified(
    tmp_path: Path, stream: bool, script: Script
) -> None:
    async def test(play: Play) -> None:
        await play.asked(1)
        assert play.silent()
        play.verdict.set_result(True)
        await play.running
        assert play.call.status == 200
        assert play.call.body in (b'{"ok": true}', EVENT + b"data: [DONE]\n\n")
        assert (play.pool.first_bytes, len(play.upstream.exchanges)) == (1, 1)

    play(tmp_path, script, test, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_failed_wake_answered_is_thrown_away_and_the_request_is_sent_again(
    tmp_path: Path, stream: bool
) -> None:
    answers = [b"wrong", b"right"]

    async def script(exchange: Exchange) -> None:
        word = answers.pop(0)
        if stream:
            await exchange.events(b"data: " + word + b"\n\n")
        else:
            await exchange.json(
                b'{"error": "%s"}' % word, "500 Internal Server Error" if answers else "200 OK"
            )

    async def test(play: Play) -> None:
        await play.asked(1)
        assert play.silent()
        play.verdict.set_result(False)
        await play.running
        assert play.call.status == 200
        assert b"right" in play.call.body
        assert b"wrong" not in play.call.body
        assert (play.pool.num_released, play.pool.first_bytes) == (2, 1)
        deadlines = [asked["deadline_s"] for asked in play.pool.asked]
        assert deadlines[0] == 50.0
        assert isinstance(deadlines[1], float)
        assert 49.0 < deadlines[1] < 50.0  # the client's patience is not renewed

    play(tmp_path, script, test, stream=stream)


@pytest.mark.parametrize("passed", [False, True])
def test_a_connection_that_breaks_before_the_verdict(tmp_path: Path, passed: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if len(exchanges) == 0:
            exchanges.append(exchange)
            exchange.die()
        else:
            await plain(exchange)

    exchanges: list[Exchange] = []

    async def test(play: Play) -> None:
        await play.asked(1)
        assert play.silent()
        play.verdict.set_result(passed)
        await play.running
        assert play.call.status == (502 if passed else 200)

    play(tmp_path, script, test)


def test_a_revoked_request_stops_the_member_at_once(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        if len(asked) == 0:
            asked.append(exchange)
            await asyncio.sleep(3600)  # a long answer, whole at its end
        await plain(exchange)

    asked: list[Exchange] = []

    async def test(play: Play) -> None:
        await play.asked(1)
        play.verdict.set_result(False)
        await play.running
        assert play.call.status == 200
        await asyncio.wait_for(play.upstream.hung_up.wait(), 5)

    play(tmp_path, script, test, watch=True)


def test_when_it_may_not_wait_again_the_client_hears_why(tmp_path: Path) -> None:
    async def test(play: Play) -> None:
        await play.asked(1)
        play.pool.error = lambda: WakeFailedError("it did not wake", retry_after_s=3)
        play.verdict.set_result(False)
        await play.running
        assert play.call.status == 503
        assert json.loads(play.call.body)["error"]["code"] == "wake_failed"

    play(tmp_path, plain, test)


def test_a_client_that_leaves_before_the_verdict_gives_its_lease_back(tmp_path: Path) -> None:
    async def test(play: Play) -> None:
        await play.asked(1)
        play.call.hang_up()
        await play.running
        assert play.pool.num_released == 1
        assert play.call.status == 0

    play(tmp_path, events, test, stream=True)
