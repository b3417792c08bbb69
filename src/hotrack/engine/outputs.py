"""What the offline API returns, with vLLM's names."""

from dataclasses import dataclass, field

from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import TokenLogprobs, unpack_tokens


@dataclass(frozen=True, slots=True)
class Logprob:
    """``rank``: 1 for the most likely token; None for the other candidates of a position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion. ``logprobs[i]``: token id -> Logprob at output position i."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its ``n`` completions. ``prompt_logprobs[0]`` is None: nothing precedes the first
    token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = True


def as_logprobs(entry: TokenLogprobs) -> dict[int, Logprob]:
    """Token id -> Logprob; the first candidate is the token itself and has the rank."""
    ids = list(unpack_tokens(entry.token_ids))
    found = {
        token: Logprob(value) for token, value in zip(reversed(ids), reversed(entry.logprobs), strict=True)
    }
    found[ids[0]] = Logprob(entry.logprobs[0], entry.rank)
    return found


def finish_name(reason: FinishReason | None) -> str | None:
    return None if reason is None else str(reason)
