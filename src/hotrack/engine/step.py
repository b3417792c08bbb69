"""What the scheduler tells the runner (StepPlan) and what the runner answers (StepResult)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from hotrack.core.request import TokenLogprobs
from hotrack.engine.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """S sequences of one step; those with exactly one token come first (``num_decodes`` of them).

    ``slots[i]``, ``starts[i]`` (position of the first new token), ``counts[i]`` (new tokens),
    ``samples[i]`` (the step reaches the sequence's end, so a token is sampled). ``admitted``: sequences
    that take over their slot in this step. ``freed_slots``: slots given back since the last plan. Sequences
    go on changing after planning; the runner takes what it needs from them when the plan is submitted.
    """

    step: int
    sequences: list[Sequence] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    num_decodes: int = 0
    admitted: list[Sequence] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    def digest(self, table: NDArray[np.int32]) -> int:
        """Hash of the plan and of each sequence's block table row in ``table`` (equal on all ranks, or they
        diverged).
        """
        hasher = xxhash.xxh3_64(np.array([self.slots, self.starts, self.counts], np.int32).tobytes())
        hasher.update(table[self.slots].tobytes())
        return hasher.intdigest()


@dataclass(frozen=True, slots=True)
class StepResult:
    """``tokens``: sampled token per sampling sequence, in plan order. ``logprobs``: by index into ``tokens``.

    ``prompt_logprobs``: by index into ``plan.sequences``, for the prompt positions computed in this step.
    """

    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
