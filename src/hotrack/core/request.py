"""Request and output types that cross process boundaries. Tokens travel as int32 little-endian buffers."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hotrack.core.lifecycle import FinishReason
from hotrack.core.sampling import SamplingParams

INT32: Literal["i"] = "i"


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """int32 little-endian buffer of token ids (the only shape tokens have between processes)."""
    return array(INT32, token_ids).tobytes()


def unpack_tokens(buffer: bytes) -> memoryview:
    """``[n]`` int32 view over a token buffer; no copy."""
    return memoryview(buffer).cast(INT32)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sequence for the engine (``n > 1`` is split into sequences by the server).

    ``prompt``: int32 token buffer. ``priority``: lower runs first, ties by arrival order.
    ``eos_token_ids`` end the sequence unless ``sampling.ignore_eos``; ``max_tokens`` is already resolved.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Top candidates at one position, most likely first; the sampled token is always entry 0.

    ``token_ids``: int32 buffer ``[k+1]``; ``logprobs``: float32 values ``[k+1]``; ``rank`` of the sampled
    token (1-based).
    """

    token_ids: bytes
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step produced for one request.

    ``tokens``: int32 buffer of new tokens (may be empty when only finishing). ``prompt_logprobs`` arrive
    once, with the
    first token: entry i is about prompt token i+1. ``num_cached_tokens``: prompt tokens served by the prefix
    cache.
    ``stop_token_id`` names the stop token that ended the sequence, if one did. ``error``, ``error_code``:
    why the request was refused or failed (``finish_reason`` is ERROR); the code is a ``HotrackError``'s.
    """

    request_id: str
    tokens: bytes
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
