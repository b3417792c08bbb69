"""One request inside the engine: its tokens (int32 buffer), its phase, and how far it has come."""

import numpy as np
from numpy.typing import NDArray

from hotrack.core.lifecycle import FinishReason, Phase
from hotrack.core.request import EngineRequest, TokenLogprobs

PHASE_MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.PREEMPTED, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.PREEMPTED, Phase.FINISHED}),
    Phase.PREEMPTED: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


class Sequence:
    """``num_tokens`` tokens are known on the host; ``num_pending`` more are being sampled by steps in
    flight and known
    only on the device. ``num_computed`` counts tokens whose K and V are written once every step in flight
    is done.

    ``key``: (priority, arrival); lower runs first. ``max_total``: length at which generation ends.
    ``slot``: row in the device tables while it holds blocks, else -1. ``in_flight``: submitted steps
    without result that contain it; its blocks and slot are given back only when this is 0.
    """

    __slots__ = (
        "_phase",
        "_tokens",
        "eos_token_ids",
        "finish_reason",
        "hashes",
        "in_flight",
        "key",
        "max_total",
        "num_cached_tokens",
        "num_computed",
        "num_pending",
        "num_tokens",
        "prompt_len",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
        "stop_token_ids",
    )

    def __init__(self, request: EngineRequest, arrival: int, max_model_len: int) -> None:
        prompt = np.frombuffer(request.prompt, np.int32)
        self.request_id = request.request_id
        self.sampling = request.sampling
        self.key = (request.priority, arrival)
        self.prompt_len = len(prompt)
        self.max_total = min(len(prompt) + request.max_tokens, max_model_len)
        self.eos_token_ids = frozenset(() if request.sampling.ignore_eos else request.eos_token_ids)
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._tokens = np.empty(min(self.max_total, len(prompt) + 256), np.int32)
        self._tokens[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.num_pending = 0
        self.num_computed = 0
        self.in_flight = 0
        self.slot = -1
        self.hashes: list[bytes] = []
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._phase = Phase.WAITING

    @property
    def phase(self) -> Phase:
        return self._phase

    @phase.setter
    def phase(self, new: Phase) -> None:
        allowed = PHASE_MOVES[self._phase]
        assert new in allowed, f"{self.request_id}: move {self._phase} -> {new} is not allowed"
        self._phase = new

    @property
    def num_total(self) -> int:
        """Known and pending tokens."""
        return self.num_tokens + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Known output tokens."""
        return self.num_tokens - self.prompt_len

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until prompt log-probabilities have been delivered with the first token."""
        return self.sampling.prompt_logprobs is not None and self.num_tokens == self.prompt_len

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 ``[num_tokens]`` view of the known tokens."""
        return self._tokens[: self.num_tokens]

    def append(self, token: int) -> None:
        """A pending token became known."""
        if self.num_tokens == len(self._tokens):
            grown = np.empty(min(2 * self.num_tokens, self.max_total), np.int32)
            grown[: self.num_tokens] = self._tokens
            self._tokens = grown
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.num_pending -= 1

    def stop_reason(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether the last appended ``token`` ends the sequence, and the stop token id that did (EOS is not
        one).
        """
        if self.num_outputs >= self.sampling.min_tokens:
            if token in self.stop_token_ids:
                return FinishReason.STOP, token
            if token in self.eos_token_ids:
                return FinishReason.STOP, None
        if self.num_tokens >= self.max_total:
            return FinishReason.LENGTH, None
        return None
