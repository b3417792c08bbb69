"""Sleep, wake, drain and death as clients see them."""

import asyncio

import pytest

from fakes.http_calls import Call, call, start, until
from fakes.members import scripted_member
from fakes.scripted_engine import ScriptedEngine, say
from hotrack.core.errors import ChecksumError, DrainingError, DrainTimeoutError, SleepError, WakeError
from hotrack.server.app import create_app
from hotrack.server.member import Member

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


async def begin_stream(app: object, engine: ScriptedEngine) -> Call:
    """A stream that has shown its first token."""
    pending = start(app, "POST", CHAT, {**ASK, "stream": True})
    await asyncio.wait_for(pending.started.wait(), 5)
    engine.pause()
    return pending


def setup(text: str = "x" * 300) -> tuple[ScriptedEngine, Member, object]:
    engine = ScriptedEngine(say(text))
    member = scripted_member(engine)
    return engine, member, create_app(member)


def test_words_and_bodies() -> None:
    async def scenario() -> None:
        engine, _, app = setup()
        assert (await call(app, "GET", "/is_sleeping")).json == {"is_sleeping": False}
        slept = (await call(app, "POST", "/sleep?level=2&mode=wait")).json
        assert (slept["status"], slept["level"]) == ("sleeping", 2)
        assert slept["report"]["freed_bytes"] == 1234
        assert engine.controls[-1] == ("sleep", {"level": 2, "mode": "wait"})
        assert (await call(app, "GET", "/is_sleeping")).json == {"is_sleeping": True}
        assert (await call(app, "GET", "/health")).status == 200
        refused = await call(app, "POST", CHAT, ASK)
        assert (refused.status, refused.error["code"]) == (503, "model_asleep")
        assert refused.headers["retry-after"] == "1"
        partly = (await call(app, "POST", "/wake_up?tags=weights")).json
        assert (partly["status"], partly["tags"]) == ("sleeping", ["weights"])
        assert (await call(app, "POST", CHAT, ASK)).status == 503
        woken = (await call(app, "POST", "/wake_up")).json
        assert (woken["status"], woken["tags"]) == ("awake", None)
        assert (await call(app, "POST", CHAT, ASK)).status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "query",
    [
        *("nbytes=0", "nbytes=-1", "nbytes=x", "nbytes=5&level=2", "nbytes=9999999999999999999999"),
        "level=3",
        "level=-1",
        "level=x",
        "level=",
        "mode=now",
        "level=99999999999999999999",
    ],
)
def test_bad_sleep(query: str) -> None:
    async def scenario() -> None:
        engine, _, app = setup()
        reply = await call(app, "POST", f"/sleep?{query}")
        assert (reply.status, reply.error["param"]) == (400, query.partition("=")[0])
        assert engine.controls == []

    asyncio.run(scenario())


def test_a_partial_sleep_says_what_is_missing() -> None:
    async def scenario() -> None:
        engine, _, app = setup()
        engine.report = {"missing_bytes": {"weights": 0, "kv_cache": 4096}}
        slept = (await call(app, "POST", "/sleep?nbytes=4KiB&mode=keep")).json
        assert engine.controls[-1] == ("sleep", {"level": 1, "mode": "keep", "nbytes": 4096})
        assert slept["report"]["missing_bytes"] == {"weights": 0, "kv_cache": 4096}
        expected = {"is_sleeping": True, "missing_bytes": {"weights": 0, "kv_cache": 4096}}
        assert (await call(app, "GET", "/is_sleeping")).json == expected
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert 'hotrack:missing_bytes{engine="0",model_name="demo",tag="kv_cache"} 4096.0' in text
        engine.report = {"missing_bytes": {"weights": 0, "kv_cache": 0}}
        await call(app, "POST", "/wake_up")
        assert (await call(app, "GET", "/is_sleeping")).json == {"is_sleeping": False}

    asyncio.run(scenario())


def test_a_streamed_wake() -> None:
    async def scenario() -> None:
        engine, member, app = setup("ok")
        await call(app, "POST", "/sleep?level=1")
        assert (await call(app, "POST", "/wake_up?streamed=maybe")).error["param"] == "streamed"
        assert (await call(app, "POST", "/wake_up?streamed=1&tags=weights")).error["param"] == "streamed"
        assert (await call(app, "POST", "/wake_up?streamed=true")).json["status"] == "awake"
        assert engine.controls[-1] == ("wake", {"tags": None, "streamed": True})
        assert (await call(app, "POST", CHAT, ASK)).status == 200
        engine.on_landed({"changed": True, "cycle": 3, "store_bytes": 5, "total_ms": 250.0}, None)
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert 'phase_seconds{engine="0",model_name="demo",operation="wake",phase="total"} 0.25' in text
        engine.on_landed({}, ChecksumError("chunk 3 is damaged"))
        assert member.residency.is_sleeping
        assert (await call(app, "POST", CHAT, ASK)).error["code"] == "model_asleep"
        assert (await call(app, "POST", "/wake_up")).json["status"] == "awake"

    asyncio.run(scenario())


def test_bad_tag() -> None:
    async def scenario() -> None:
        engine, _, app = setup()
        assert (await call(app, "POST", "/wake_up?tags=weights&tags=bananas")).status == 400
        assert engine.controls == []

    asyncio.run(scenario())


def test_levels_of_a_second_sleep() -> None:
    async def scenario() -> None:
        _, _, app = setup()
        await call(app, "POST", "/sleep?level=1")
        # The engine stays at its level, and the answer says so.
        assert (await call(app, "POST", "/sleep?level=2")).json["level"] == 1
        assert (await call(app, "POST", "/sleep?level=0")).json["level"] == 1

    asyncio.run(scenario())


def test_failed_sleep_leaves_it_awake_and_failed_wake_asleep() -> None:
    async def scenario() -> None:
        engine, _, app = setup("ok")
        engine.refuse = SleepError("rank 1 could not unmap")
        reply = await call(app, "POST", "/sleep")
        assert (reply.status, reply.error["code"]) == (500, "sleep_failed")
        assert (await call(app, "POST", CHAT, ASK)).status == 200
        await call(app, "POST", "/sleep")
        engine.refuse = WakeError("no memory")
        assert (await call(app, "POST", "/wake_up")).error["code"] == "wake_failed"
        assert (await call(app, "GET", "/is_sleeping")).json == {"is_sleeping": True}
        assert (await call(app, "POST", CHAT, ASK)).error["code"] == "model_asleep"

    asyncio.run(scenario())


def test_abort_ends_streams_with_an_error_event() -> None:
    async def scenario() -> None:
        engine, _, app = setup()
        stream = await begin_stream(app, engine)
        assert (await call(app, "POST", "/sleep?mode=abort")).status == 200
        await asyncio.wait_for(stream.task, 5)
        assert stream.reply.events[-1]["error"]["code"] == "model_asleep"
        assert stream.reply.complete

    asyncio.run(scenario())


def test_keep_lets_streams_go_on_after_the_wake() -> None:
    async def scenario() -> None:
        engine, _, app = setup("hello")
        stream = await begin_stream(app, engine)
        await call(app, "POST", "/sleep?mode=keep")
        await call(app, "POST", "/wake_up")
        engine.resume()
        await asyncio.wait_for(stream.task, 5)
        assert "".join(e["choices"][0]["delta"]["content"] for e in stream.reply.events[:-1]) == "hello"

    asyncio.run(scenario())


def test_transition_outlives_the_client_that_asked() -> None:
    async def scenario() -> None:
        engine, member, _ = setup()
        gate = asyncio.Event()
        control = engine.control

        async def slow(op: str, **args: object) -> dict[str, object]:
            await gate.wait()
            return await control(op, **args)

        engine.control = slow  # type: ignore[method-assign]
        asked = asyncio.create_task(member.residency.sleep(1, "abort"))
        await asyncio.sleep(0)
        asked.cancel()
        gate.set()
        await until(lambda: member.residency.is_sleeping)
        assert asked.cancelled()

    asyncio.run(scenario())


def test_engine_death_answers_everyone() -> None:
    async def scenario() -> None:
        engine, member, app = setup()
        stream = await begin_stream(app, engine)
        whole = start(app, "POST", CHAT, ASK)
        await until(lambda: len(engine.requests) == 2)
        error = engine.die()
        member.residency.engine_died(error)
        await asyncio.wait_for(asyncio.gather(stream.task, whole.task), 5)
        assert stream.reply.events[-1]["error"]["code"] == "engine_dead"
        assert (whole.reply.status, whole.reply.error["code"]) == (503, "engine_dead")
        for method, path in (("GET", "/health"), ("POST", CHAT), ("POST", "/sleep"), ("POST", "/wake_up")):
            reply = await call(app, method, path, ASK)
            assert (reply.status, reply.error["code"]) == (503, "engine_dead")

    asyncio.run(scenario())


def test_drain() -> None:
    async def scenario() -> None:
        engine, member, app = setup("ok" * 30)
        stream = await begin_stream(app, engine)
        draining = asyncio.create_task(member.residency.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            member.residency.check()
        assert not draining.done()
        engine.resume()
        assert await draining
        await stream.task
        assert stream.reply.events[-1] == "[DONE]"

    asyncio.run(scenario())


def test_drain_deadline() -> None:
    async def scenario() -> None:
        engine, member, app = setup()
        stream = await begin_stream(app, engine)
        assert not await member.residency.drain(0)
        member.residency.fail_all(DrainTimeoutError("too late"))
        await asyncio.wait_for(stream.task, 5)
        assert stream.reply.events[-1]["error"]["code"] == "drain_timeout"
        assert len(engine.aborted) == 1

    asyncio.run(scenario())


def test_sleep_state_metric() -> None:
    async def scenario() -> None:
        _, _, app = setup()
        await call(app, "POST", "/sleep?level=1")
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert (
            'vllm:engine_sleep_state{engine="0",model_name="demo",sleep_state="weights_offloaded"} 1.0'
            in text
        )
        assert (
            'sleep_mode_operation_duration_seconds_count{engine="0",model_name="demo",operation="sleep"} 1.0'
            in text
        )
        assert (await call(app, "POST", "/reset_prefix_cache")).json == {"success": True}

    asyncio.run(scenario())
