"""Response bodies of the OpenAI API. Fields that are vLLM's extensions are left out unless asked for."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    details = PromptTokensDetails(cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """vLLM's entry for one candidate at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishedReason = Literal["stop", "length"]


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishedReason
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, tag_field="object", tag="text_completion"):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "hotrack"
    parent: str | None = None


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class SleepResponse(msgspec.Struct):
    """vLLM's body, and under ``report`` what was measured."""

    status: str
    level: int
    report: dict[str, Any]


class WakeResponse(msgspec.Struct):
    status: str
    tags: list[str] | None
    report: dict[str, Any]


class IsSleepingResponse(msgspec.Struct):
    """``missing_bytes``: by tag, what a wake would bring back; while asleep."""

    is_sleeping: bool
    missing_bytes: dict[str, int] | UnsetType = UNSET


class ResetPrefixCacheResponse(msgspec.Struct):
    success: bool


class VersionResponse(msgspec.Struct):
    version: str


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    error: ErrorDetail
