"""Every bad request gets a typed answer that names what is wrong; none reaches the engine."""

import asyncio
from typing import Any

import pytest

from fakes.http_calls import call, start
from fakes.members import scripted_member
from fakes.scripted_engine import ScriptedEngine
from hotrack.server.app import create_app

USER = [{"role": "user", "content": "hi"}]
PART = "messages[0].content[0]"
TOO_LONG = "context_length_exceeded"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


BAD = [
    (CHAT, b"", 400, "invalid_json", None),
    (CHAT, b"{", 400, "invalid_json", None),
    (CHAT, b"\xff\xfe", 400, "invalid_json", None),
    (CHAT, b'{"messages":[{"role":"user","content":"\xff"}]}', 400, "invalid_json", None),
    (CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400, "invalid_json", None),
    (CHAT, b'{"x":' + b"[" * 50_000, 400, "invalid_json", None),
    (CHAT, b"[1]", 400, "invalid_request", None),
    (CHAT, {}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": "hi"}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "invalid_request", "messages[0]"),
    (CHAT, user(IMAGE), 400, "unsupported_content", PART),
    (CHAT, chat(model="nope"), 404, "model_not_found", "model"),
    (CHAT, chat(max_tokens=-1), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_tokens=0), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_completion_tokens=-5), 400, "invalid_request", "max_completion_tokens"),
    (CHAT, chat(max_tokens="5"), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_tokens=1.5), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_tokens=True), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, "invalid_request", "max_tokens"),
    (CHAT, chat(max_tokens=1000), 400, TOO_LONG, "max_tokens"),
    (CHAT, chat(max_completion_tokens=1000), 400, TOO_LONG, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 99}, 400, "invalid_request", "logprobs"),
    (CHAT, user("x" * 600), 400, TOO_LONG, "messages"),
    (CHAT, user("x" * 100_000), 400, TOO_LONG, "messages"),
    (CHAT, chat(n=0), 400, "invalid_request", "n"),
    (CHAT, chat(n=10**6), 400, "invalid_request", "n"),
    (CHAT, chat(temperature=-1), 400, "invalid_request", "temperature"),
    (CHAT, chat(top_p=0), 400, "invalid_request", "top_p"),
    (CHAT, chat(top_p=2), 400, "invalid_request", "top_p"),
    (CHAT, chat(min_tokens=9, max_tokens=3), 400, "invalid_request", "min_tokens"),
    (CHAT, chat(seed=2**70), 400, "invalid_request", "seed"),
    (CHAT, chat(stop=[""]), 400, "invalid_request", "stop"),
    (CHAT, chat(stop=[5]), 400, "invalid_request", "stop[0]"),
    (CHAT, chat(stop=["x" * 5000]), 400, "invalid_request", "stop"),
    (CHAT, chat(logit_bias={"a": 1}), 400, "invalid_request", "logit_bias"),
    (CHAT, chat(logit_bias={"99999": 1}), 400, "invalid_request", "logit_bias"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "invalid_request", "top_logprobs"),
    (CHAT, chat(top_logprobs=3), 400, "invalid_request", "top_logprobs"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_request", "stream_options"),
    (CHAT, chat(stream=True, prompt_logprobs=1), 400, "unsupported_parameter", "prompt_logprobs"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "unsupported_parameter", "response_format"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "unsupported_parameter", "tools"),
    (CHAT, chat(tool_choice="required"), 400, "unsupported_parameter", "tool_choice"),
    (CHAT, chat(guided_json={"type": "object"}), 400, "unsupported_parameter", "guided_json"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), 400, "invalid_request", "chat_template_kwargs"),
    (COMPLETIONS, {}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": 5}, 400, "invalid_request", "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, 400, "invalid_request", "n"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "unsupported_parameter", "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "unsupported_parameter", "best_of"),
    (COMPLETIONS, {"prompt": "a", "priority": 2**40}, 400, "invalid_request", "priority"),
    (COMPLETIONS, {"prompt": "a" * 5000}, 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, {"prompt": "a" * 5_000_000}, 400, "context_length_exceeded", "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5000}, 400, "context_length_exceeded", "max_tokens"),
    (CHAT, chat(messages=[USER[0] | {"content": "a" * 5000}]), 400, "context_length_exceeded", "messages"),
    ("/tokenize", {"prompt": "a" * 5_000_000}, 400, "context_length_exceeded", "prompt"),
    ("/tokenize", {}, 400, "invalid_request", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, 400, "invalid_request", "prompt"),
    ("/detokenize", {"tokens": [2**31]}, 400, "invalid_request", "tokens[0]"),
    ("/detokenize", {"tokens": [99999]}, 400, "invalid_request", "tokens"),
    ("/nope", {}, 404, "not_found", None),
]  # fmt: skip


@pytest.mark.parametrize(("url", "body", "status", "code", "param"), BAD, ids=range(len(BAD)))
def test_bad_request(url: str, body: Any, status: int, code: str, param: str | None) -> None:
    async def scenario() -> None:
        engine = ScriptedEngine()
        reply = await call(create_app(scripted_member(engine)), "POST", url, body)
        assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
        assert reply.error["type"] == "invalid_request_error"
        assert reply.error["message"]
        assert engine.requests == []

    asyncio.run(scenario())


def test_context_error_has_the_numbers() -> None:
    async def scenario() -> None:
        reply = await call(create_app(scripted_member(ScriptedEngine())), "POST", CHAT, chat(max_tokens=1000))
        for number in ("512", "4", "1000"):
            assert number in reply.error["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs must be"),
        ({"max_completion_tokens": 0}, "max_completion_tokens must be"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs to be true"),
        ({"prompt_logprobs": 99}, "prompt_logprobs must be"),
        (
            {"min_tokens": 9, "max_completion_tokens": 3},
            "min_tokens (9) is greater than max_completion_tokens (3)",
        ),
    ],
)
def test_messages_name_the_clients_field(fields: dict[str, Any], start: str) -> None:
    async def scenario() -> None:
        reply = await call(create_app(scripted_member(ScriptedEngine())), "POST", CHAT, chat(**fields))
        assert reply.error["message"].startswith(start)

    asyncio.run(scenario())


def test_large_body_is_refused_unread() -> None:
    async def scenario() -> None:
        app = create_app(scripted_member(ScriptedEngine()))
        body = b" " * (50 << 20)
        declared = start(app, "POST", CHAT, body, {"content-length": str(len(body))})
        await declared.task
        assert (declared.reply.status, declared.reply.error["code"]) == (413, "payload_too_large")
        assert declared.body_reads == 0
        chunked = start(app, "POST", CHAT, body)
        await chunked.task
        assert chunked.reply.status == 413
        assert chunked.body_reads <= (8 << 20) // 65536 + 1

    asyncio.run(scenario())


def test_wrong_method() -> None:
    async def scenario() -> None:
        reply = await call(create_app(scripted_member(ScriptedEngine())), "GET", CHAT)
        assert reply.status == 405
        assert reply.headers["allow"] == "POST"
        assert "GET" in reply.error["message"]

    asyncio.run(scenario())


def test_unknown_fields_are_ignored_and_counted() -> None:
    async def scenario() -> None:
        app = create_app(scripted_member(ScriptedEngine()))
        reply = await call(
            app, "POST", CHAT, chat(surprise=1, service_tier="auto", guided_json=None, user="u")
        )
        assert reply.status == 200
        text = (await call(app, "GET", "/metrics")).body.decode()
        assert 'hotrack:ignored_request_fields_total{engine="0",model_name="demo"} 1.0' in text

    asyncio.run(scenario())


def test_key_guards_everything_but_probes() -> None:
    async def scenario() -> None:
        app = create_app(scripted_member(ScriptedEngine(), api_key="geheim ü"))
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "geheim"}):
            for method, path in (
                ("POST", CHAT),
                ("GET", "/v1/models"),
                ("POST", "/sleep"),
                ("POST", "/wake_up"),
            ):
                reply = await call(app, method, path, chat(), headers)
                assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
        for path in ("/health", "/metrics", "/version", "/openapi.json"):
            assert (await call(app, "GET", path)).status == 200

    asyncio.run(scenario())


def test_right_key_opens() -> None:
    async def scenario() -> None:
        app = create_app(scripted_member(ScriptedEngine(), api_key="geheim"))
        assert (await call(app, "POST", CHAT, chat(), {"authorization": "Bearer geheim"})).status == 200

    asyncio.run(scenario())
