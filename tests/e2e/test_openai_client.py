"""The official ``openai`` client against a real member."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from fakes.member_process import MemberProcess

pytestmark = pytest.mark.e2e
USER = [{"role": "user", "content": "Say something."}]
FREE = {"ignore_eos": True}  # a random model may end at once


@pytest.fixture(scope="module")
def client(member: MemberProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{member.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "hotrack"


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=8, temperature=0, extra_body=FREE
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_stream_is_the_same_answer(client: OpenAI) -> None:
    fields = {"model": "tiny", "messages": USER, "max_tokens": 12, "temperature": 0, "extra_body": FREE}
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert {c.id for c in chunks} == {chunks[0].id}


def test_choices(client: OpenAI) -> None:
    fields = {
        "model": "tiny",
        "messages": USER,
        "max_tokens": 8,
        "n": 3,
        "temperature": 1,
        "seed": 3,
        "extra_body": FREE,
    }
    answer = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    again = client.chat.completions.create(**fields)
    assert [choice.message.content for choice in again.choices] == texts


def test_chat_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=USER,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        extra_body=FREE,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=5, n=2, logprobs=2, seed=1, extra_body=FREE
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert all(len(choice.logprobs.tokens) == 5 for choice in answer.choices if choice.logprobs)
    stream = client.completions.create(model="tiny", prompt="one", max_tokens=5, stream=True, temperature=0)
    assert all(chunk.object == "text_completion" for chunk in stream)


def test_stop_string(client: OpenAI) -> None:
    fields = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0, "extra_body": FREE}
    text = client.completions.create(**fields).choices[0].text
    stop = text[5:7]
    choice = client.completions.create(**fields, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    pieces = [
        chunk.choices[0].text for chunk in client.completions.create(**fields, stop=[stop], stream=True)
    ]
    assert "".join(pieces) == choice.text


def test_errors_have_their_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=USER, max_tokens=100_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=USER, temperature=-1)


def test_retries_ride_out_a_sleep(member: MemberProcess) -> None:
    """503 with Retry-After: 1 makes the client wait and ask again; by then the model is awake."""
    requests = 0

    def count(_: object) -> None:
        nonlocal requests
        requests += 1
        if requests == 2:
            assert member.post("/wake_up")[1]["status"] == "awake"

    member.post("/sleep?level=1")
    hooks = openai.DefaultHttpxClient(event_hooks={"request": [count]})
    with OpenAI(base_url=f"{member.url}/v1", api_key="unused", max_retries=2, http_client=hooks) as client:
        answer = client.chat.completions.create(model="tiny", messages=USER, max_tokens=2)
    assert answer.choices[0].finish_reason
    assert requests == 2


def test_asleep_without_retries(client: OpenAI, member: MemberProcess) -> None:
    member.post("/sleep?level=1")
    try:
        with pytest.raises(openai.InternalServerError) as asleep:
            client.chat.completions.create(model="tiny", messages=USER)
        assert (asleep.value.status_code, asleep.value.code) == (503, "model_asleep")
    finally:
        member.post("/wake_up")
