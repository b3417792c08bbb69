"""Routing, keys, listings and admin endpoints over a pool of fake members."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fakes.asgi import AsgiCall
from fakes.clock import VirtualClock, run_virtual
from fakes.fake_member import World
from hotrack.config.pool_file import load_pool_text
from hotrack.core.errors import ConfigError
from hotrack.gateway.app import Gateway, create_app
from hotrack.gateway.auth import Keys
from hotrack.gateway.build import member_specs, pool_policy
from hotrack.pool.pool import Pool

CONFIG = load_pool_text(
    """
models:
  a: {cmd: 'run ${PORT}', sleep_level: 1, aliases: [first], name: Model A, metadata: {k: 1}}
  b: {cmd: 'run ${PORT}', sleep_level: 1, unlisted: true}
"""
)
Test = Callable[[Gateway], Awaitable[None]]


def play(test: Test, keys: Keys | None = None, world: World | None = None) -> None:
    world = world or World()

    async def main() -> None:
        pool = Pool(member_specs(CONFIG), pool_policy(CONFIG), clock=VirtualClock(), connect=world.connect)
        app = create_app(pool, CONFIG, keys or Keys())
        await pool.start()
        app.ready.set()
        try:
            await test(app)
        finally:
            await pool.close()

    run_virtual(main())


async def call(app: Gateway, method: str, path: str, *, key: str = "", body: bytes = b"") -> tuple[int, Any]:
    path, _, query = path.partition("?")
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    request = AsgiCall(app, path, body, method=method, headers=headers, query=query.encode())
    await request.run()
    assert request.complete
    try:
        return request.status, json.loads(request.body)
    except ValueError:
        return request.status, request.body.decode()


def test_models_are_listed_whatever_their_state() -> None:
    async def test(app: Gateway) -> None:
        status, body = await call(app, "GET", "/v1/models")
        assert status == 200
        (card,) = body["data"]  # b is unlisted
        assert (card["id"], card["status"], card["aliases"], card["name"]) == (
            "a",
            "asleep",
            ["first"],
            "Model A",
        )
        assert card["metadata"] == {"k": 1}
        await call(app, "POST", "/wake_up?model=a")
        assert (await call(app, "GET", "/v1/models"))[1]["data"][0]["status"] == "loaded"
        assert (await call(app, "GET", "/v1/models/first"))[1]["id"] == "a"
        assert (await call(app, "GET", "/v1/models/zzz"))[0] == 404
        assert (await call(app, "GET", "/v1/models/b"))[0] == 404

    play(test)


def test_a_failed_member_is_not_put_to_sleep_and_operators_wakes_are_told_apart() -> None:
    world = World()

    async def test(app: Gateway) -> None:
        assert (await call(app, "POST", "/wake_up?model=b"))[0] == 200
        world.members["a"].die()
        status, body = await call(app, "POST", "/sleep?model=a")
        assert (status, body["error"]["code"]) == (503, "member_failed")
        assert "ended unexpectedly" in body["error"]["message"]
        swaps = (await call(app, "GET", "/api/pool/swaps"))[1]["swaps"]
        assert [swap["cause"] for swap in swaps if swap["to"] == "b"][-1] == "operator"
        numbers = [value for swap in swaps for value in swap.values() if isinstance(value, float)]
        assert numbers
        assert numbers == [round(number, 3) for number in numbers]

    play(test, world=world)


def test_a_refused_request_gets_an_id_too() -> None:
    async def test(app: Gateway) -> None:
        for given, kept in ((b"mine", True), (b"<b>", False)):
            request = AsgiCall(app, "/v1/completions", b"{}", headers=[(b"x-request-id", given)])
            await request.run()
            assert request.status == 401
            assert (request.headers[b"x-request-id"] == given) == kept
            assert request.headers[b"x-request-id"]

    play(test, Keys(api=("k",)))


def test_sleep_wake_and_unload_move_members() -> None:
    async def test(app: Gateway) -> None:
        async def states() -> dict[str, str]:
            return {
                row["name"]: row["state"]
                for row in (await call(app, "GET", "/api/pool/members"))[1]["members"]
            }

        assert await states() == {"a": "asleep", "b": "asleep"}
        assert await call(app, "POST", "/wake_up?model=first") == (200, {"status": "awake", "tags": None})
        assert (await call(app, "GET", "/is_sleeping?model=a"))[1] == {"is_sleeping": False}
        assert (await call(app, "POST", "/wakeup", body=b'{"model": "b"}'))[0] == 200
        assert await states() == {"a": "asleep", "b": "ready"}
        running = (await call(app, "GET", "/running"))[1]["running"]
        assert [row["model"] for row in running] == ["a", "b"]
        assert "cmd" not in running[0]
        assert (await call(app, "POST", "/sleep?model=b"))[1] == {"status": "sleeping", "level": 1}
        assert (await call(app, "POST", "/sleep?model=b&level=2"))[0] == 400
        assert (await call(app, "POST", "/sleep"))[0] == 400
        assert (await call(app, "POST", "/sleep", body=b"{"))[0] == 400
        assert (await call(app, "POST", "/sleep", body=b"x" * 70_000))[0] == 413
        assert (await call(app, "POST", "/sleep?model=zzz"))[0] == 404
        assert (await call(app, "POST", "/api/models/unload/a"))[1]["unloaded"] == ["a"]
        assert (await call(app, "POST", "/sleep?model=a"))[1] == {"status": "stopped", "level": 1}
        assert (await call(app, "POST", "/api/models/unload"))[1]["unloaded"] == ["a", "b"]
        assert await states() == {"a": "stopped", "b": "stopped"}
        swaps = (await call(app, "GET", "/api/pool/swaps"))[1]["swaps"]
        assert ["b"] in [swap["to"] and swap["from"] for swap in swaps] or swaps
        woken = next(swap for swap in swaps if swap["to"] == "b" and swap["from"] == ["a"])
        assert woken["result"] == "ok"
        assert {"drain_ms", "sleep_ms", "wake_ms", "verify_ms", "victim_bytes_before"} <= set(woken)

    play(test)


def test_open_endpoints_show_no_details_and_need_no_key() -> None:
    async def test(app: Gateway) -> None:
        assert await call(app, "GET", "/health") == (200, {"status": "ok"})
        assert await call(app, "GET", "/ready") == (200, {"status": "ready"})
        app.ready.clear()
        assert (await call(app, "GET", "/ready"))[0] == 503
        status, text = await call(app, "GET", "/metrics")
        assert status == 200
        assert 'pool_member_state{member="a",state="asleep"} 1.0' in text

    play(test, Keys(("user",), ("admin",)))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/running", "/api/pool/members", "/api/pool/swaps", "/api/events"]
)
def test_listings_need_a_key(path: str) -> None:
    async def test(app: Gateway) -> None:
        assert (await call(app, "GET", path))[0] == 401
        assert (await call(app, "GET", path, key="wrong"))[0] == 401
        if path != "/api/events":
            assert (await call(app, "GET", path, key="user"))[0] == 200
            assert (await call(app, "GET", path, key="admin"))[0] == 200

    play(test, Keys(("user",), ("admin",)))


def test_inference_needs_a_key_before_the_body_is_read() -> None:
    async def test(app: Gateway) -> None:
        status, body = await call(app, "POST", "/v1/chat/completions", body=b"not even json")
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert (await call(app, "POST", "/v1/chat/completions", key="user", body=b"not json"))[0] == 400

    play(test, Keys(("user",), ("admin",)))


def test_operating_needs_an_admin_key() -> None:
    async def test(app: Gateway) -> None:
        for path in ("/sleep?model=a", "/wake_up?model=a", "/unload", "/api/models/unload"):
            assert (await call(app, "POST", path))[0] == 401
            assert (await call(app, "POST", path, key="user"))[0] == 403
        assert (await call(app, "POST", "/wake_up?model=a", key="admin"))[0] == 200
        assert (await call(app, "GET", "/logs/stream/a", key="user"))[0] == 403

    play(test, Keys(("user",), ("admin",)))


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc",
        "/reset_prefix_cache",
        "/pause",
        "/upstream/a/sleep",
        "/v1/../collective_rpc",
        "/%73leep",
    ],
)
def test_nothing_else_of_a_member_can_be_reached(path: str) -> None:
    async def test(app: Gateway) -> None:
        status, body = await call(app, "POST", path, body=b'{"model": "a"}')
        assert (status, body["error"]["code"]) == (404, "not_found")

    play(test)


def test_wrong_methods_are_typed() -> None:
    async def test(app: Gateway) -> None:
        assert (await call(app, "GET", "/v1/chat/completions"))[0] == 404
        status, body = await call(app, "PUT", "/health")
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")

    play(test)


def test_events_tell_of_states_as_they_change() -> None:
    async def test(app: Gateway) -> None:
        stream = AsgiCall(app, "/api/events", method="GET")
        task = stream.start()
        await stream.until(lambda c: len(c.pieces) >= 2)
        await call(app, "POST", "/wake_up?model=a")
        await stream.until(lambda c: b'"SwapDone"' in c.body)
        app.stopping.set()
        await task
        assert stream.complete
        events = [json.loads(line[6:]) for line in stream.body.splitlines() if line.startswith(b"data: ")]
        assert [event["name"] for event in events if event["type"] == "Member"] == ["a", "b"]
        moves = [(e["old"], e["new"]) for e in events if e["type"] == "StateChanged" and e["member"] == "a"]
        assert moves == [("asleep", "waking"), ("waking", "verifying"), ("verifying", "ready")]

    play(test)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
@pytest.mark.parametrize("keys", [Keys(), Keys(api=("k",)), Keys(admin=("k",))])
def test_listening_beyond_this_machine_needs_both_keys(host: str, keys: Keys) -> None:
    with pytest.raises(ConfigError, match="key"):
        keys.check_bind(host)
    Keys(("k",), ("a",)).check_bind(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_this_machine_needs_none(host: str) -> None:
    Keys().check_bind(host)
