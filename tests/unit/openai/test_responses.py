"""Response bodies decode to the official client's types."""

import msgspec
from openai.types import Completion as TheirCompletion
from openai.types import Model as TheirModel
from openai.types.chat import ChatCompletion as TheirChat

from hotrack.openai import responses as ours


def test_chat_completion() -> None:
    top = ours.TopLogprob("a", -1.0, [97])
    logprobs = ours.ChatLogprobs([ours.TokenLogprob("a", -1.0, [97], [top])])
    choice = ours.ChatChoice(0, ours.AssistantMessage("a"), logprobs, "stop")
    body = msgspec.json.encode(ours.ChatCompletion("id", 1, "m", [choice], ours.usage(3, 2, 1)))
    parsed = TheirChat.model_validate_json(body, strict=True)
    assert parsed.choices[0].message.content == "a"
    assert parsed.usage is not None
    assert parsed.usage.total_tokens == 5
    assert b"token_ids" not in body


def test_completion_and_model() -> None:
    logprobs = ours.CompletionLogprobs(["a"], [-1.0], [{"a": -1.0}], [0])
    choice = ours.CompletionChoice(0, "a", logprobs, "length")
    body = msgspec.json.encode(ours.Completion("id", 1, "m", [choice], ours.usage(1, 1, 0)))
    assert TheirCompletion.model_validate_json(body, strict=True).choices[0].text == "a"
    assert (
        TheirModel.model_validate_json(msgspec.json.encode(ours.ModelCard("m", 1, "r", 5)), strict=True).id
        == "m"
    )
