"""Sampling parameters, with vLLM's names, ranges and defaults."""

from dataclasses import dataclass, field
from typing import Any

from hotrack.core.errors import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens for one request.

    ``seed``: random numbers are a function of (seed, output position) alone, so a seed gives the same tokens
    whatever else is in the batch. The server fills it in when the client gave none, so all ranks agree.
    ``max_tokens=None`` means "until the context is full". ``top_k`` 0 or -1 means no limit.

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 1, None)
        _check("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check("top_k", self.top_k, -1, None)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check(name, value, 0, MAX_LOGPROBS)
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check(name: str, value: Any, low: float, high: float | None, *, open_low: bool = False) -> None:
    # NaN fails every comparison, so test for "inside", not for "outside".
    inside = (value > low if open_low else value >= low) and (high is None or value <= high)
    if not inside:
        bracket = "(" if open_low else "["
        upper = "inf" if high is None else f"{high:g}"
        raise RequestError(f"{name} must be in {bracket}{low:g}, {upper}], got {value}", param=name)
