"""Per-slot sampling state and the batch view the sampler reads.

Owner: the model runner, which gives every running sequence a slot. State is kept in arrays indexed by slot,
so a step costs a few fancy-index copies and never walks Python objects: ``batch = state.select(slots)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotrack.core.errors import RequestError
from hotrack.core.sampling import SamplingParams

FEW = 256  # a top_k up to this is drawn from the candidates alone, never from the whole vocabulary

IntArray = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: IntArray, positions: IntArray) -> npt.NDArray[np.float64]:
    """float64 in [0, 1), a function of (seed, position) only.

    It is output number ``position`` of the SplitMix64 stream that starts at ``mix64(seed)``; mixing the
    seed first keeps the streams of neighbouring seeds apart. ``seeds``, ``positions``: int64 of one shape;
    negative seeds are read as two's complement.
    """
    start = _mix64(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix64(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Penalties:
    """P rows of the batch that use a penalty.

    ``rows`` int64 [P, 1]; ``tokens`` int64 [P, L]: every token in prompt or output, some of them more than
    once so that rows are equally long; ``output_counts`` int32 [P, L]: how often each is in the output;
    factors float32 [P, 1].
    """

    rows: Tensor
    tokens: Tensor
    output_counts: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class SparseBias:
    """``values`` float32 [N] to add to the logits at (``rows``, ``tokens``), int64 [N]; -inf forbids."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class RandomRows:
    """N rows of the batch with a temperature, and what they need. ``None``: none of these rows uses the
    feature.

    ``rows`` int64 [N], or ``None`` for every row of the batch; ``uniforms`` float64 [N, 1]; ``temperature``,
    ``log_min_p`` (-inf: no limit) float32 [N, 1]; ``top_k`` int64 [N, 1] (0: no limit); ``top_p`` float64
    [N, 1] (1: no limit). ``few_candidates``: every row has ``0 < top_k <= FEW``, so only the top of the
    vocabulary matters.
    """

    rows: Tensor | None
    uniforms: Tensor
    temperature: Tensor
    top_k: Tensor | None
    max_top_k: int
    top_p: Tensor | None
    log_min_p: Tensor | None
    few_candidates: bool

    def take(self, index: Tensor | slice) -> "RandomRows":
        """The rows at ``index`` (int64 [M] or a slice) of these; ``rows`` no longer says where they are."""
        return replace(
            self,
            rows=None,
            uniforms=self.uniforms[index],
            temperature=self.temperature[index],
            top_k=None if self.top_k is None else self.top_k[index],
            top_p=None if self.top_p is None else self.top_p[index],
            log_min_p=None if self.log_min_p is None else self.log_min_p[index],
        )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What ``Sampler`` needs for R rows. ``None`` or empty: no row uses the feature and its stage is skipped.

    ``random`` has one entry per way of drawing; together they hold ``num_random`` rows, the others are
    greedy. ``logprobs_rows`` int64 [M]: rows that want log-probabilities; ``num_logprobs``: the most that
    any of them wants.
    """

    num_rows: int
    num_random: int
    random: tuple[RandomRows, ...] = ()
    bias: SparseBias | None = None
    penalties: Penalties | None = None
    logprobs_rows: Tensor | None = None
    num_logprobs: int = 0


class SamplingState:
    """Sampling parameters and token counts of up to ``max_num_seqs`` sequences, by slot.

    Output counts (int32 [V]) and the list of tokens seen exist only for slots with a penalty.
    ``select`` for step n+1 must follow ``append`` of step n; neither reads device values on the host, so a
    step may be planned before the tokens of the one before are known.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._position = np.zeros(max_num_seqs, np.int64)
        self._min_tokens = np.zeros(max_num_seqs, np.int64)
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._penalty = np.zeros((max_num_seqs, 3), np.float32)  # repetition, presence, frequency
        self._count_row = np.full(max_num_seqs, -1, np.int64)  # row of the count tables, -1: no penalties
        self._free_rows: list[int] = []
        self._output_counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)
        self._seen = torch.zeros(0, 64, dtype=torch.int64, device=self.device)  # tokens in prompt or output
        self._num_seen = np.zeros(max_num_seqs, np.int64)
        self._bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self._stop_ids: dict[int, IntArray] = {}  # only while min_tokens forbids them

    def add(
        self,
        slot: int,
        params: SamplingParams,
        *,
        prompt_token_ids: npt.ArrayLike,
        output_token_ids: npt.ArrayLike = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Take over a sequence. ``output_token_ids``: int32, non-empty when a preempted sequence resumes.

        Raises:
            RequestError: ``logit_bias`` names a token outside the vocabulary (nothing is changed).
        """
        assert params.greedy or params.seed is not None, "the server gives every random request a seed"
        check_logit_bias(params, self.vocab_size)
        self.remove(slot)
        outputs = np.asarray(output_token_ids, np.int64)
        seed = params.seed or 0
        self._seed[slot] = np.uint64(seed & (2**64 - 1)).astype(np.int64)
        self._position[slot] = outputs.size
        self._min_tokens[slot] = params.min_tokens
        self._temperature[slot] = params.temperature
        self._top_k[slot] = max(params.top_k, 0) if params.top_k < self.vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int64)
            self._bias[slot] = ids, np.fromiter(params.logit_bias.values(), np.float32)
        if outputs.size < params.min_tokens:
            ids = np.unique(np.array([*eos_token_ids, *params.stop_token_ids], np.int64))
            self._stop_ids[slot] = ids[(ids >= 0) & (ids < self.vocab_size)]
        if params.needs_penalties:
            self._penalty[slot] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
            self._count_tokens(slot, np.asarray(prompt_token_ids, np.int64), outputs)

    def remove(self, slot: int) -> None:
        """Forget a slot; removing an empty one does nothing."""
        self._temperature[slot] = 0.0
        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        row = int(self._count_row[slot])
        if row >= 0:
            self._free_rows.append(row)
            self._count_row[slot] = -1

    def append(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Record one sampled token per slot. ``tokens``: int32 [R] on the state's device, in slot order."""
        index = np.asarray(slots, np.int64)
        self._position[index] += 1
        count_rows = self._count_row[index]
        chosen = np.flatnonzero(count_rows >= 0)
        if chosen.size:
            # An invalid row carries token -1; its request is about to end, so what it counts does not matter.
            self._count_sampled(index[chosen], tokens[self._to_device(chosen)].long().clamp_min(0))
        for slot in [s for s in self._stop_ids if self._position[s] >= self._min_tokens[s]]:
            del self._stop_ids[slot]

    def _count_sampled(self, slots: IntArray, tokens: Tensor) -> None:
        self._grow(self._seen.shape[0], int(self._num_seen[slots].max()) + 1)
        rows = self._to_device(self._count_row[slots])
        self._seen[rows, self._to_device(self._num_seen[slots])] = tokens
        self._num_seen[slots] += 1
        one = torch.ones((), dtype=torch.int32, device=self.device)
        self._output_counts.index_put_((rows, tokens), one, accumulate=True)

    def is_plain(self, slots: Sequence[int]) -> bool:
        """Whether all of them want the most likely token, of logits as they are, and nothing else."""
        index = np.asarray(slots, np.int64)
        return not (
            (self._temperature[index] > 0).any()
            or (self._num_logprobs[index] >= 0).any()
            or (self._count_row[index] >= 0).any()
            or any(slot in self._bias or slot in self._stop_ids for slot in slots)
        )

    def select(self, slots: Sequence[int]) -> SamplingBatch:
        """The batch whose row i samples the next token of ``slots[i]``."""
        index = np.asarray(slots, np.int64)
        wanted = np.flatnonzero(self._num_logprobs[index] >= 0)
        random = self._select_random(index)
        return SamplingBatch(
            num_rows=index.size,
            num_random=sum(group.uniforms.shape[0] for group in random),
            random=random,
            bias=self._select_bias(index) if self._bias or self._stop_ids else None,
            penalties=self._select_penalties(index),
            logprobs_rows=self._to_device(wanted) if wanted.size else None,
            num_logprobs=int(self._num_logprobs[index].max(initial=0)),
        )

    def _select_random(self, index: IntArray) -> tuple[RandomRows, ...]:
        random = np.flatnonzero(self._temperature[index] > 0)
        top_k = self._top_k[index[random]]
        few = (top_k > 0) & (top_k <= FEW)
        groups = (random[few], True), (random[~few], False)
        return tuple(self._random_rows(index, rows, few) for rows, few in groups if rows.size)

    def _random_rows(self, index: IntArray, rows: IntArray, few_candidates: bool) -> RandomRows:
        slots = index[rows]
        top_k, top_p, min_p = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        return RandomRows(
            rows=self._to_device(rows) if rows.size < index.size else None,
            uniforms=self._to_device(uniforms(self._seed[slots], self._position[slots])[:, None]),
            temperature=self._to_device(self._temperature[slots, None]),
            top_k=self._to_device(top_k[:, None]) if top_k.any() else None,
            max_top_k=int(top_k.max()),
            top_p=self._to_device(top_p[:, None]) if (top_p < 1.0).any() else None,
            log_min_p=self._to_device(min_p[:, None]).log_() if min_p.any() else None,
            few_candidates=few_candidates,
        )

    def _select_bias(self, index: IntArray) -> SparseBias | None:
        rows, tokens, values = [], [], []
        for row, slot in enumerate(index.tolist()):
            if slot in self._bias:
                ids, bias = self._bias[slot]
                rows.append(np.full(ids.size, row))
                tokens.append(ids)
                values.append(bias)
            if slot in self._stop_ids:
                ids = self._stop_ids[slot]
                rows.append(np.full(ids.size, row))
                tokens.append(ids)
                values.append(np.full(ids.size, -np.inf, np.float32))
        if not rows:
            return None
        return SparseBias(*(self._to_device(np.concatenate(parts)) for parts in (rows, tokens, values)))

    def _select_penalties(self, index: IntArray) -> Penalties | None:
        count_rows = self._count_row[index]
        chosen = np.flatnonzero(count_rows >= 0)
        if not chosen.size:
            return None
        rows = self._to_device(count_rows[chosen, None])
        tokens = self._seen[rows[:, 0], : int(self._num_seen[index[chosen]].max())]
        factors = self._to_device(self._penalty[index[chosen]])
        return Penalties(
            rows=self._to_device(chosen[:, None]),
            tokens=tokens,
            output_counts=self._output_counts[rows, tokens],
            repetition=factors[:, 0:1],
            presence=factors[:, 1:2],
            frequency=factors[:, 2:3],
        )

    def _count_tokens(self, slot: int, prompt: IntArray, outputs: IntArray) -> None:
        seen = np.unique(np.concatenate((prompt, outputs)))
        assert seen.size, "a sequence has a prompt"
        if not self._free_rows:
            old = self._seen.shape[0]
            self._grow(max(4, 2 * old), self._seen.shape[1])
            self._free_rows.extend(range(self._seen.shape[0] - 1, old - 1, -1))
        self._grow(self._seen.shape[0], int(seen.size))
        row = self._free_rows.pop()
        self._count_row[slot] = row
        self._num_seen[slot] = seen.size
        self._seen[row] = int(seen[0])  # padding that repeats a token changes nothing
        self._seen[row, : seen.size] = self._to_device(seen)
        counts = np.bincount(outputs, minlength=self.vocab_size).astype(np.int32)
        self._output_counts[row] = self._to_device(counts)

    def _grow(self, rows: int, columns: int) -> None:
        """Room for ``rows`` sequences of ``columns`` seen tokens; what is there stays."""
        old_rows, old_columns = self._seen.shape
        if rows > old_rows:
            counts = self._output_counts.new_zeros(rows, self.vocab_size)
            counts[:old_rows] = self._output_counts
            self._output_counts = counts
        if rows > old_rows or columns > old_columns:
            columns = max(columns, 2 * old_columns) if columns > old_columns else old_columns
            seen = self._seen.new_zeros(rows, columns)
            seen[:old_rows] = self._seen[:, :1]
            seen[:old_rows, :old_columns] = self._seen
            self._seen = seen

    def _to_device(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError when ``logit_bias`` names a token outside ``[0, vocab_size)``."""
    for token in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias names token {token}; this model has tokens 0 to {vocab_size - 1}",
                param="logit_bias",
            )
