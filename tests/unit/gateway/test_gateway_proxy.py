"""The hot path against a member that answers with dictated bytes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.asgi import AsgiCall
from fakes.leases import FakeLeases
from fakes.raw_upstream import Exchange, RawUpstream, raw_upstream
from hotrack.core.errors import DeadlineExceededError, QueueFullError, WakeFailedError
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes

CHAT = "/v1/chat/completions"
ROUTES = Routes(
    {
        "m": Route("m", "m"),
        "alias": Route("m", "m"),
        "filtered": Route("m", "inner", frozenset({"temperature"}), {"top_p": 0.5}),
    },
    ["m"],
)
Test = Callable[[Proxy, FakeLeases, RawUpstream], Awaitable[Any]]


def body(model: str = "m", **fields: Any) -> bytes:
    return json.dumps({"model": model, **fields}).encode()


def play(folder: Path, script: Any, test: Test, *, watch: bool = False, **options: Any) -> Any:
    async def main() -> Any:
        async with raw_upstream(folder, script, watch=watch) as upstream:
            pool = FakeLeases(upstream.endpoint)
            return await asyncio.wait_for(test(Proxy(pool, ROUTES, **options), pool, upstream), 10)

    return asyncio.run(main())


async def answer(exchange: Exchange) -> None:
    await exchange.json(b'{"ok": true}')


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until ``condition`` holds."""
    while not condition():  # noqa: ASYNC110 - the condition is about plain attributes of fakes
        await asyncio.sleep(0)


def error_of(call: AsgiCall) -> dict[str, Any]:
    error = json.loads(call.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def test_plain_answer_passes_through_with_its_headers_and_the_request_id(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(
            b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\nx-engine: e\r\nconnection: keep-alive\r\n\r\n",
            b"ab",
            b"cd",
        )

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(
            proxy, CHAT, body(x=1.50), headers=[(b"x-request-id", b"r1"), (b"authorization", b"secret")]
        )
        await call.run()
        assert (call.status, call.body, call.complete) == (201, b"abcd", True)
        assert call.headers[b"x-engine"] == b"e"
        assert call.headers[b"x-request-id"] == b"r1"
        assert b"connection" not in call.headers
        seen = upstream.exchanges[0]
        assert seen.body == body(x=1.50)
        assert b"x-request-id: r1" in seen.head
        assert b"secret" not in seen.head
        assert pool.asked[0]["request_id"] == "r1"
        assert pool.num_released == 1

    play(tmp_path, script, test)


def test_connections_are_reused_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await answer(exchange)
        if b"bye" in exchange.body:
            exchange.die()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        for text in ("a", "b", "bye", "c"):
            call = AsgiCall(proxy, CHAT, body(prompt=text))
            await call.run()
            assert call.status == 200, call.body
        assert upstream.num_connections == 2

    play(tmp_path, script, test)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.binary(min_size=0, max_size=40).map(lambda b: b.replace(b"\n", b"")), max_size=8),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    newline=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_streams_are_byte_exact_and_handed_on_in_whole_events(
    tmp_path: Path, events: list[bytes], cuts: list[int], newline: bytes
) -> None:
    stream = b"".join(b"data: " + event + newline for event in events)
    pieces, rest = [], stream
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)

    async def script(exchange: Exchange) -> None:
        await exchange.events(*pieces)

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=True))
        await call.run()
        assert (call.status, call.body, call.complete) == (200, stream, True)
        assert all(piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in call.pieces)

    (tmp_path / "member.sock").unlink(missing_ok=True)
    play(tmp_path, script, test)


def test_a_stream_of_declared_length_can_still_end_with_an_error_event(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n"
        await exchange.write(head + b"data: a\n\n")
        await asyncio.sleep(0.02)
        exchange.die()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=True))
        await call.run()
        assert b"content-length" not in call.headers
        assert call.body.startswith(b'data: a\n\ndata: {"error"')

    play(tmp_path, script, test)


def test_an_unfinished_last_event_is_still_delivered(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.events(b"data: a\n\nda", b"ta: b")

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=True))
        await call.run()
        assert call.body == b"data: a\n\ndata: b"

    play(tmp_path, script, test)


def test_a_large_plain_answer_is_streamed_through(tmp_path: Path) -> None:
    big = bytes(range(256)) * 4096 * 3

    async def script(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(big), big)

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body())
        await call.run()
        assert call.body == big
        assert len(call.pieces) > 1

    play(tmp_path, script, test)


def test_alias_and_filters_change_only_what_they_must(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        raw = b'{"seed": 1.0e2, "model": "alias", "s": "\\u00e9"}'
        await AsgiCall(proxy, CHAT, raw).run()
        assert json.loads(upstream.exchanges[0].body) == {"seed": 100.0, "model": "m", "s": "\u00e9"}
        assert b"1.0e2" in upstream.exchanges[0].body
        await AsgiCall(proxy, CHAT, body("filtered", temperature=2, top_p=1, n=1)).run()
        assert json.loads(upstream.exchanges[1].body) == {"model": "inner", "top_p": 0.5, "n": 1}

    play(tmp_path, answer, test)


@pytest.mark.parametrize(
    ("raw", "status", "code", "words"),
    [
        (b'{"model": "x\xff"}', 400, "invalid_request", "UTF-8"),
        (b'{"model": "m", "s": "\xff"}', 400, "invalid_request", "UTF-8"),
        (b'{"model": "m", ', 400, "invalid_request", "JSON"),
        (b"[]", 400, "invalid_request", "object"),
        (b"", 400, "invalid_request", "JSON"),
        (b'{"model": 5}', 400, "invalid_request", "model"),
        (b'{"model": "m", "a": ' + b"[" * 100_000, 400, "invalid_request", "deep"),
        (b'{"messages": []}', 400, "invalid_request", "'model' is required; served models: m"),
        (b'{"model": "nope"}', 404, "model_not_found", "served models: m"),
        (b'{"model": "' + b"n" * 5000 + b'"}', 404, "model_not_found", "..."),
    ],
)
def test_bad_requests_are_answered_without_the_pool(
    tmp_path: Path, raw: bytes, status: int, code: str, words: str
) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, raw)
        await call.run()
        assert call.status == status
        assert error_of(call)["code"] == code
        assert words in error_of(call)["message"]
        assert len(call.body) < 1000
        assert not pool.asked

    play(tmp_path, answer, test)


def test_a_declared_oversize_is_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, b"x", headers=[(b"content-length", b"50000000")])
        await call.run()
        assert (call.status, call.num_read) == (413, 0)
        assert error_of(call)["code"] == "payload_too_large"

    play(tmp_path, answer, test)


def test_an_undeclared_oversize_is_refused_at_the_limit(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, pieces=[b"x" * 600] * 10)
        await call.run()
        assert (call.status, call.num_read) == (413, 2)

    play(tmp_path, answer, test, max_body_bytes=1000)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_bad_deadline_is_refused(tmp_path: Path, seconds: str) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(), headers=[(b"x-hotrack-deadline-s", seconds.encode())])
        await call.run()
        assert call.status == 400
        assert f"got {seconds!r}" in call.body.decode()

    play(tmp_path, answer, test)


def test_priority_and_deadline_reach_the_pool(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        await AsgiCall(proxy, CHAT, body(priority=3), headers=[(b"x-hotrack-deadline-s", b"2.5")]).run()
        assert (pool.asked[0]["priority"], pool.asked[0]["deadline_s"]) == (3, 2.5)

    play(tmp_path, answer, test)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFullError("full", retry_after_s=2.2), 429, b"3"),
        (WakeFailedError("no", retry_after_s=10), 503, b"10"),
        (DeadlineExceededError("late"), 504, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_lease_has_its_status_code_and_retry_after(
    tmp_path: Path, error: Any, status: int, retry: bytes | None, stream: bool
) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        pool.error = lambda: error
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        await call.run()
        assert (call.status, call.headers.get(b"Retry-After")) == (status, retry)
        assert error_of(call)["code"] == error.code
        assert not upstream.exchanges

    play(tmp_path, answer, test)


def test_an_unreachable_member_is_a_503(tmp_path: Path) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        (tmp_path / "member.sock").unlink()
        call = AsgiCall(proxy, CHAT, body())
        await call.run()
        assert (call.status, error_of(call)["code"]) == (503, "member_failed")
        assert b"Retry-After" in call.headers
        assert pool.num_released == 1

    play(tmp_path, answer, test)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_a_broken_answer_is_a_502(tmp_path: Path, raw: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(raw)
        exchange._writer.close()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body())
        await call.run()
        assert (call.status, error_of(call)["code"]) == (502, "bad_gateway")
        assert pool.num_released == 1

    play(tmp_path, script, test)


def test_a_member_dying_mid_stream_ends_it_with_an_error_event(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunks(b"data: a\n\n", b"data: b\n\ndata: hal")
        await asyncio.sleep(0.05)  # let it arrive: an abort may overtake data
        exchange.die()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=True))
        await call.run()
        assert call.complete
        first, second, last = call.body.split(b"\n\n")[:3]
        assert (first, second) == (b"data: a", b"data: b")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "bad_gateway"
        assert b"[DONE]" not in call.body

    play(tmp_path, script, test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_abandoned_lease_ends_the_answer_and_hangs_up(tmp_path: Path, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if stream:
            await exchange.start_events()
            await exchange.chunks(b"data: a\n\n")
        await asyncio.Event().wait()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        task = call.start()
        await until(lambda: bool(upstream.exchanges) and (not stream or bool(call.pieces)))
        pool.held[0].abandoned.set()
        await task
        await upstream.hung_up.wait()
        assert pool.num_released == 1
        assert call.complete
        if stream:
            assert call.pieces[0] == b"data: a\n\n"
            assert json.loads(call.pieces[1].removeprefix(b"data: "))["error"]["code"] == "drain_timeout"
            assert b"[DONE]" not in call.body
        else:
            assert (call.status, error_of(call)["code"]) == (503, "drain_timeout")

    play(tmp_path, script, test, watch=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_mid_answer_aborts_the_member(tmp_path: Path, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if stream:
            await exchange.start_events()
            await exchange.chunks(b"data: a\n\n")
        await asyncio.Event().wait()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        task = call.start()
        await until(lambda: bool(upstream.exchanges) and (not stream or bool(call.pieces)))
        call.hang_up()
        await task
        await upstream.hung_up.wait()
        assert pool.num_released == 1
        assert not pool.held

    play(tmp_path, script, test, watch=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_while_waiting_withdraws(tmp_path: Path, stream: bool) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        pool.gate.clear()
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        task = call.start()
        await until(lambda: bool(pool.asked))
        call.hang_up()
        await task
        assert pool.num_withdrawn == 1
        assert not upstream.exchanges
        assert not call.status

    play(tmp_path, answer, test)


def test_first_byte_and_outcome_are_reported_once(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    async def script(exchange: Exchange) -> None:
        await exchange.events(b"data: a\n\n", b"data: b\n\n")

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        pool.gate.clear()
        task = AsgiCall(proxy, CHAT, body(stream=True)).start()
        pool.gate.set()
        await asyncio.sleep(0)
        await task
        await AsgiCall(proxy, CHAT, body("nope")).run()
        assert pool.first_bytes == 1
        assert seen == [("m", "200")]

    play(tmp_path, script, test, observe=lambda *outcome: seen.append(outcome))


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_shuts_down_ends_answers_with_a_typed_error(tmp_path: Path, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if stream:
            await exchange.start_events()
            await exchange.chunks(b"data: a\n\n")
        await asyncio.Event().wait()

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        task = call.start()
        await until(lambda: bool(upstream.exchanges) and (not stream or bool(call.pieces)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert call.complete
        assert b'"code":"draining"' in call.body
        assert call.status == (200 if stream else 503)
        assert pool.num_released == 1

    play(tmp_path, script, test, watch=True)


DEAD = (
    b'{"error":{"message":"rank 0 was killed","type":"service_unavailable",'
    b'"param":null,"code":"engine_dead"}}'
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_member_without_its_engine_is_reported_at_once(tmp_path: Path, stream: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if stream:
            await exchange.events(b'data: {"choices":[{"text":"a"}]}\n\n', b"data: " + DEAD + b"\n\n")
        else:
            head = b"HTTP/1.1 503 x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
                DEAD
            )
            await exchange.write(head, DEAD)

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(stream=stream))
        await call.run()
        assert DEAD in call.body
        assert pool.deaths == ["rank 0 was killed"]

    play(tmp_path, script, test)


@pytest.mark.parametrize(
    "text",
    [
        b'{"choices":[{"text":"engine_dead"}]}',
        b'{"error":{"message":"engine_dead is a code","code":"invalid_request"}}',
        b"engine_dead",
    ],
)
def test_an_answer_about_dead_engines_is_no_death(tmp_path: Path, text: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.events(b"data: " + text + b"\n\n")

    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        await AsgiCall(proxy, CHAT, body(stream=True)).run()
        assert pool.deaths == []

    play(tmp_path, script, test)


@pytest.mark.parametrize("given", [b"a b", b"x" * 129, b"\xe9"])
def test_a_request_id_that_is_not_harmless_is_replaced_everywhere(tmp_path: Path, given: bytes) -> None:
    async def test(proxy: Proxy, pool: FakeLeases, upstream: RawUpstream) -> None:
        call = AsgiCall(proxy, CHAT, body(), headers=[(b"x-request-id", given)])
        await call.run()
        echoed = call.headers[b"x-request-id"]
        assert len(echoed) == 32
        assert b"x-request-id: " + echoed in upstream.exchanges[0].head
        assert given not in upstream.exchanges[0].head
        assert pool.asked[0]["request_id"] == echoed.decode()

    play(tmp_path, answer, test)
