"""Request fields to ``SamplingParams`` and a token budget."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hotrack.core.errors import RequestError
from hotrack.core.sampling import SamplingParams
from hotrack.openai.parse import unsupported
from hotrack.openai.requests import ChatCompletionRequest, CompletionRequest, GenerationRequest
from hotrack.server.codec import too_long

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chat runs until the context is full
_DEFAULTS_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    *_DEFAULTS_FROM_MODEL, "n", "min_tokens", "presence_penalty", "frequency_penalty", "seed", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


def model_defaults(generation_defaults: Mapping[str, float]) -> dict[str, float]:
    """Sampling defaults a model brings along, in the types ``SamplingParams`` has."""
    return {name: int(value) if name == "top_k" else value for name, value in generation_defaults.items()}


def build_sampling(
    request: GenerationRequest, defaults: Mapping[str, float], vocab_size: int
) -> SamplingParams:
    """Everything but the token budget, which needs the prompt's length.

    Raises:
        RequestError: a value out of range or a combination that means nothing; ``param`` names the field.
    """
    _refuse_unsupported(request)
    values: dict[str, Any] = dict(defaults)
    values |= {name: value for name in _PLAIN if (value := getattr(request, name)) is not None}
    stop = request.stop
    names = {"max_tokens": budget_field(request)}
    if isinstance(request, ChatCompletionRequest):
        names["logprobs"] = "top_logprobs"
    logprobs, logit_bias = _num_logprobs(request), _logit_bias(request.logit_bias or {}, vocab_size)
    try:
        return SamplingParams(
            **values,
            max_tokens=_requested_max_tokens(request),
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logprobs=logprobs,
            logit_bias=logit_bias,
        )
    except RequestError as error:
        for ours, theirs in names.items():  # no text of the client is in these messages
            error.message = re.sub(rf"\b{ours}\b", theirs, error.message, count=1)
        error.param = names.get(error.param or "", error.param)
        raise


def token_budget(
    sampling: SamplingParams, prompt_tokens: int, max_model_len: int, param: str, budget_param: str
) -> int:
    """Tokens this sequence may generate: what was asked for, or all that fit. ``param``: the prompt's field;
    ``budget_param``: the budget's.

    Raises:
        ContextLengthError: prompt and completion do not fit together.
    """
    left = max_model_len - prompt_tokens
    if left < 1 or (sampling.max_tokens or 0) > left:
        raise too_long(prompt_tokens, sampling.max_tokens or 0, max_model_len, param, budget_param)
    return left if sampling.max_tokens is None else sampling.max_tokens


def for_choice(sampling: SamplingParams, index: int, fresh_seed: int) -> SamplingParams:
    """Parameters of choice ``index``: one sequence, a seed of its own (derived from the client's if it gave
    one)."""
    seed = fresh_seed if sampling.seed is None else sampling.seed + index
    return replace(sampling, n=1, seed=seed)


def budget_field(request: GenerationRequest) -> str:
    """The field that the token budget is taken from."""
    newer = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _requested_max_tokens(request: GenerationRequest) -> int | None:
    asked: int | None = getattr(request, budget_field(request))
    if asked is None and isinstance(request, CompletionRequest):
        return COMPLETION_MAX_TOKENS
    return asked


def _num_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatCompletionRequest)
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    """Token id -> bias, clamped to OpenAI's [-100, 100]."""
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: {key!r} is not a token id of this model (0 to {vocab_size - 1})",
                param="logit_bias",
            )
        result[int(key)] = min(100.0, max(-100.0, value))
    return result


def _refuse_unsupported(request: GenerationRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported(
            "response_format",
            f"response_format {request.response_format.type!r} is not supported: this server does not "
            "constrain its output; "
            "use 'text' and ask for the format in the prompt",
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    if isinstance(request, CompletionRequest) and request.suffix:
        raise unsupported("suffix", "suffix (fill in the middle) is not supported; leave it out")
    if isinstance(request, ChatCompletionRequest) and request.tools and request.tool_choice != "none":
        raise unsupported(
            "tools", "tools are not supported by this server; leave them out or set tool_choice to 'none'"
        )
    if isinstance(request, ChatCompletionRequest) and request.tool_choice not in (None, "none", "auto"):
        raise unsupported(
            "tool_choice", "tool_choice asks for a tool call, which this server does not support"
        )
