"""The OpenAI endpoints against a scripted engine."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fakes.http_calls import Reply, call, start, until
from fakes.members import scripted_member
from fakes.scripted_engine import ScriptedEngine, byte_tokenizer, say
from hotrack.server.app import create_app

USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def run(
    body: dict[str, Any],
    url: str = CHAT,
    *,
    engine: Callable[[], ScriptedEngine] = ScriptedEngine,
    **member: Any,
) -> tuple[Reply, ScriptedEngine]:
    async def scenario() -> tuple[Reply, ScriptedEngine]:
        scripted = engine()
        return await call(create_app(scripted_member(scripted, **member)), "POST", url, body), scripted

    return asyncio.run(scenario())


def speaking(text: str, **options: Any) -> Callable[[], ScriptedEngine]:
    return lambda: ScriptedEngine(say(text, **options))


def test_chat() -> None:
    reply, engine = run({"messages": USER, "model": "alias"}, engine=speaking("héllo 😀"))
    assert reply.status == 200
    body = reply.json
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "héllo 😀"}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert body["model"] == "demo"
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 12  # bytes of the text, and the end token
    assert engine.requests[0].max_tokens == 512 - 4  # what the context leaves


def test_stream_is_the_answer_in_pieces() -> None:
    whole, _ = run({"messages": USER}, engine=speaking("héllo 😀 wörld"))
    reply, _ = run(
        {"messages": USER, "stream": True, "stream_options": {"include_usage": True}},
        engine=speaking("héllo 😀 wörld"),
    )
    *events, usage, done = reply.events
    assert done == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(e["choices"][0]["delta"]["content"] for e in events)
    assert text == whole.json["choices"][0]["message"]["content"]
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "stop"
    assert all(e["usage"] is None for e in events)
    assert (usage["choices"], usage["usage"]) == ([], whole.json["usage"])
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.complete


def test_usage_is_absent_unless_asked_for() -> None:
    reply, _ = run({"messages": USER, "stream": True})
    assert all("usage" not in event for event in reply.events[:-1])


def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply, _ = run({"messages": USER, "stream": True, "stream_options": options}, engine=speaking("abc"))
    counts = [e["usage"]["completion_tokens"] for e in reply.events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_cached_tokens_are_reported() -> None:
    def engine() -> ScriptedEngine:
        scripted = ScriptedEngine()
        scripted.cached_tokens = 3
        return scripted

    reply, _ = run({"messages": USER, "n": 2}, engine=engine)
    assert reply.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert reply.json["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_never_shows(stream: bool) -> None:
    reply, engine = run(
        {"messages": USER, "stop": ["wör", "zz"], "stream": stream},
        engine=speaking("hello wörld", then_eos=False),
    )
    if stream:
        events = reply.events[:-1]
        assert "".join(e["choices"][0]["delta"]["content"] for e in events) == "hello "
        choice = events[-1]["choices"][0]
    else:
        choice = reply.json["choices"][0]
        assert choice["message"]["content"] == "hello "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wör")
    assert len(engine.aborted) == 1  # the engine would have gone on


def test_stop_string_can_be_kept() -> None:
    reply, _ = run(
        {"messages": USER, "stop": "l", "include_stop_str_in_output": True}, engine=speaking("foolish")
    )
    assert reply.json["choices"][0]["message"]["content"] == "fool"


def test_stop_token_ends_without_showing() -> None:
    token = byte_tokenizer().token_to_id("l")
    reply, _ = run({"messages": USER, "stop_token_ids": [token]}, engine=speaking("hello"))
    choice = reply.json["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("he", token)


def test_length_ends_and_releases_what_was_held_back() -> None:
    reply, _ = run({"messages": USER, "stop": ["lxx"], "max_completion_tokens": 4}, engine=speaking("hello"))
    choice = reply.json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("hell", "length")


def test_choices_have_seeds_of_their_own() -> None:
    reply, engine = run({"messages": USER, "n": 3, "seed": 7})
    assert [c["index"] for c in reply.json["choices"]] == [0, 1, 2]
    assert sorted(r.sampling.seed for r in engine.requests) == [7, 8, 9]
    assert all(r.sampling.n == 1 for r in engine.requests)
    _, engine = run({"messages": USER, "n": 2})
    seeds = {r.sampling.seed for r in engine.requests}
    assert len(seeds) == 2
    assert None not in seeds


def test_parameters_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "min_tokens": 2, "ignore_eos": True, "seed": 5,
    }  # fmt: skip
    _, engine = run({"messages": USER, **fields, "max_tokens": 3, "logit_bias": {"5": -200}, "priority": -3})
    request = engine.requests[0]
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert request.sampling.logit_bias == {5: -100.0}
    assert (request.max_tokens, request.priority) == (3, -3)


def test_chat_logprobs() -> None:
    reply, _ = run(
        {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 2}, engine=speaking("é")
    )
    first, second = reply.json["choices"][0]["logprobs"]["content"]
    assert first["bytes"] + second["bytes"] == list("é".encode())
    assert first["logprob"] == -0.5
    assert len(first["top_logprobs"]) == 2
    reply, _ = run({"messages": USER, "logprobs": True, "max_tokens": 2, "stream": True})
    assert [len(e["choices"][0]["logprobs"]["content"]) for e in reply.events[1:-1]] == [1, 1]


def test_completions_take_every_kind_of_prompt() -> None:
    for prompt, num in [("ab", 1), (["ab", "c"], 2), ([70, 71], 1), ([[70], [71, 72], [73]], 3)]:
        reply, engine = run({"prompt": prompt, "n": 2}, COMPLETIONS)
        assert [c["index"] for c in reply.json["choices"]] == list(range(2 * num))
        assert len(engine.requests) == 2 * num
    assert engine.requests[0].max_tokens == 16


def test_completion_logprobs_and_echo() -> None:
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "max_tokens": 2}
    reply, engine = run(body, COMPLETIONS, engine=speaking("cd"))
    choice = reply.json["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert engine.requests[0].sampling.prompt_logprobs == 1
    reply, _ = run({"prompt": "ab", "echo": True, "stream": True}, COMPLETIONS, engine=speaking("cd"))
    assert "".join(e["choices"][0]["text"] for e in reply.events[:-1]) == "abcd"


def test_prompt_logprobs_and_token_ids() -> None:
    reply, _ = run({"messages": USER, "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 1})
    body = reply.json
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) == 4
    assert body["prompt_logprobs"][0] is None
    token = str(body["prompt_token_ids"][1])
    assert body["prompt_logprobs"][1][token] == {"logprob": -0.5, "rank": 1, "decoded_token": "h"}
    assert len(body["choices"][0]["token_ids"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_include_tokens_without_text(stream: bool) -> None:
    ids = byte_tokenizer().encode("a😀").ids
    body = {
        "prompt": "a",
        "return_token_ids": True,
        "max_tokens": 4,
        "stream": stream,
    }  # ends inside the character
    reply, _ = run(body, COMPLETIONS, engine=speaking("a😀b"))
    choices = [e["choices"][0] for e in reply.events[:-1]] if stream else reply.json["choices"]
    assert [i for choice in choices for i in choice["token_ids"]] == ids[:4]


def test_models_tokenize_detokenize() -> None:
    async def scenario() -> None:
        app = create_app(scripted_member(ScriptedEngine()))
        models = (await call(app, "GET", "/v1/models")).json
        assert [m["id"] for m in models["data"]] == ["demo", "alias"]
        assert models["data"][0]["max_model_len"] == 512
        assert (await call(app, "GET", "/v1/models/alias")).json["id"] == "alias"
        tokens = (await call(app, "POST", "/tokenize", {"prompt": "hé", "return_token_strs": True})).json
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"]) == 3
        text = (await call(app, "POST", "/detokenize", {"tokens": tokens["tokens"]})).json
        assert text == {"prompt": "hé"}
        chat = (await call(app, "POST", "/tokenize", {"messages": USER})).json
        assert chat["count"] == 4

    asyncio.run(scenario())


def test_no_template_still_completes() -> None:
    reply, _ = run({"messages": USER}, template=None)
    assert (reply.status, reply.error["code"]) == (400, "no_chat_template")
    reply, _ = run({"prompt": "a"}, COMPLETIONS, template=None)
    assert reply.status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_aborts_in_the_engine(stream: bool) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(say("x" * 400))
        app = create_app(scripted_member(engine))
        pending = start(app, "POST", CHAT, {"messages": USER, "stream": stream, "n": 2})
        await until(lambda: len(engine.requests) == 2 and (not stream or len(pending.reply.chunks) >= 3))
        pending.hang_up()
        await asyncio.wait_for(pending.task, 5)
        assert len(engine.aborted) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_while_queued(stream: bool) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.pause()
        pending = start(
            create_app(scripted_member(engine)), "POST", CHAT, {"messages": USER, "stream": stream}
        )
        await until(lambda: engine.requests)
        pending.hang_up()
        await asyncio.wait_for(pending.task, 5)
        assert len(engine.aborted) == 1

    asyncio.run(scenario())


def test_more_requests_than_the_server_takes() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        engine.pause()
        app = create_app(scripted_member(engine, max_concurrent_requests=2))
        waiting = [start(app, "POST", CHAT, {"messages": USER}) for _ in range(2)]
        await until(lambda: len(engine.requests) == 2)
        refused = await call(app, "POST", CHAT, {"messages": USER})
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        engine.resume()
        await asyncio.gather(*(pending.task for pending in waiting))
        assert [pending.reply.status for pending in waiting] == [200, 200]
        assert (await call(app, "POST", CHAT, {"messages": USER})).status == 200

    asyncio.run(scenario())


def test_slow_readers_get_outputs_together() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(say("x" * 50))
        app = create_app(scripted_member(engine))
        pending = start(app, "POST", CHAT, {"messages": USER, "stream": True})
        send, gate = pending._send, asyncio.Event()

        async def slow(message: dict[str, Any]) -> None:
            await send(message)
            if message["type"] == "http.response.body" and len(pending.reply.chunks) == 1:
                await gate.wait()

        pending.task.cancel()
        scope = {
            "type": "http",
            "method": "POST",
            "path": CHAT,
            "headers": [],
            "query_string": b"",
            "raw_path": b"",
        }
        body = iter([b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'])

        async def receive() -> dict[str, Any]:
            for part in body:
                return {"type": "http.request", "body": part, "more_body": False}
            await asyncio.Event().wait()
            return {}

        task = asyncio.create_task(app(scope, receive, slow))
        for _ in range(400):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.wait_for(task, 5)
        assert len(pending.reply.events) == 1 + 51 + 1  # role, tokens, [DONE]: nothing lost
        assert len(pending.reply.chunks) == 2  # what waited was written at once

    asyncio.run(scenario())
