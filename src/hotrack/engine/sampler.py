"""From logits to tokens: a pure function of (logits, ``SamplingBatch``), with vLLM's stages in vLLM's order.

    raw log-probabilities; min_tokens and logit_bias; penalties; greedy argmax
                                                     or temperature; min-p, top-k, top-p; inverse CDF

min-p, top-k and top-p each become one threshold per row ("keep logits >= t"), so the candidates do not
depend on how a sort breaks ties: **every token tied with the last one kept is kept**. The draw walks the
kept probabilities in token order with one uniform per row, which depends on (seed, output position) alone;
the other rows of the batch have no part in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hotrack.core.request import TokenLogprobs
from hotrack.engine.sampling_batch import Penalties, SamplingBatch, SparseBias

INVALID_TOKEN = -1
_BLOCK = 256  # tokens per block of the two-level cumulative sum
_NUCLEUS_CANDIDATES = 128
_MORE_CANDIDATES = 4096
_TOPK_LIMIT = 512  # above this torch.topk is slower on CPU than a partition


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """``token_ids`` int32 and ``logprobs`` float32 [M, k+1]: the chosen token first, then the k most likely.

    ``ranks`` int32 [M]: how many tokens are at least as likely as the chosen one (1: it is the most likely).
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor

    def tolist(self, num_logprobs: int | None = None) -> list[TokenLogprobs]:
        """Wire form of every row, cut to ``num_logprobs`` beside the chosen token. Waits for the device."""
        end = self.token_ids.shape[1] if num_logprobs is None else num_logprobs + 1
        ids = self.token_ids[:, :end].cpu().numpy()
        values = self.logprobs[:, :end].tolist()
        ranks = self.ranks.tolist()
        return [TokenLogprobs(ids[i].tobytes(), tuple(values[i]), ranks[i]) for i in range(len(ranks))]


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """``tokens`` int32 [R]: ``INVALID_TOKEN`` where the logits held NaN or +inf, or no token was left to
    choose.

    ``logprobs``: for the rows of ``batch.logprobs_rows``, in that order.
    """

    tokens: Tensor
    logprobs: LogprobsTensors | None = None


class Sampler:
    """Stateless; see the module docstring. On a device other than the CPU nothing is copied to the host."""

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
        """``logits``: float32 [R, V], unchanged on return."""
        processed = apply_penalties(apply_bias(logits, batch.bias), batch.penalties)
        highest, greedy = processed.max(dim=-1)
        tokens = torch.where(highest.isfinite(), greedy, INVALID_TOKEN)
        if not batch.all_greedy:
            tokens = _merge_random(tokens, processed, highest, batch)
        return SamplerOutput(tokens.int(), _sampled_logprobs(logits, tokens, batch))


def compute_logprobs(logits: Tensor, tokens: Tensor, num_logprobs: int) -> LogprobsTensors:
    """Raw log-probabilities: log-softmax of the untouched logits.

    ``logits`` float32 [M, V]; ``tokens`` integer [M]; ``num_logprobs`` may be 0. For prompt
    log-probabilities, give the logits of each prompt position with the prompt token that follows it.
    """
    chosen_ids = tokens.long().clamp_min(0).unsqueeze(-1)
    chosen = logits.gather(-1, chosen_ids)
    top, top_ids = logits.topk(min(num_logprobs, logits.shape[-1]), dim=-1)
    values = torch.cat((chosen, top), dim=-1) - logits.logsumexp(dim=-1, keepdim=True)
    ranks = (logits >= chosen).sum(dim=-1, dtype=torch.int32)
    return LogprobsTensors(torch.cat((chosen_ids, top_ids), dim=-1).int(), values, ranks)


def apply_bias(logits: Tensor, bias: SparseBias | None) -> Tensor:
    """float32 [R, V] with ``bias`` added; a copy when there is any."""
    if bias is None:
        return logits
    return logits.index_put((bias.rows, bias.tokens), bias.values, accumulate=True)


def apply_penalties(logits: Tensor, penalties: Penalties | None) -> Tensor:
    """Repetition divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL,
    Keskar et al. 2019); frequency is subtracted per occurrence in the output, presence once (OpenAI)."""
    if penalties is None:
        return logits
    x = logits[penalties.rows]
    present = penalties.output_counts > 0
    factor = torch.where(x > 0, 1.0 / penalties.repetition, penalties.repetition)
    x = torch.where(present | penalties.in_prompt, x * factor, x)
    x = x - penalties.frequency * penalties.output_counts - penalties.presence * present
    return logits.index_copy(0, penalties.rows, x)


def _sampled_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> LogprobsTensors | None:
    rows = batch.logprobs_rows
    if rows is None:
        return None
    if rows.shape[0] == batch.num_rows:
        return compute_logprobs(logits, tokens, batch.num_logprobs)
    return compute_logprobs(logits[rows], tokens[rows], batch.num_logprobs)


def _merge_random(tokens: Tensor, logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
    rows = batch.random_rows
    if rows is None:
        return _sample_random(logits, highest.unsqueeze(-1), batch)
    return tokens.index_copy(0, rows, _sample_random(logits[rows], highest[rows].unsqueeze(-1), batch))


def _sample_random(logits: Tensor, highest: Tensor, batch: SamplingBatch) -> Tensor:
    """int64 [N]. ``logits`` [N, V] and their maxima ``highest`` [N, 1], both before temperature."""
    assert batch.temperature is not None, f"{batch.num_random=}"
    assert batch.uniforms is not None, f"{batch.num_random=}"
    # Subtracting the maximum first keeps a tiny temperature from overflowing: the best token is at exactly 0.
    scaled = (logits - highest).div_(batch.temperature)
    weights = scaled.exp()
    threshold = batch.log_min_p
    candidates = _descending_candidates(scaled, batch)
    if batch.top_k is not None:
        threshold = _top_k_threshold(candidates, batch.top_k, threshold)
    if batch.top_p is not None:
        threshold = _top_p_threshold(scaled, weights, candidates, batch.top_p, threshold)
    if threshold is not None:
        weights = torch.where(scaled >= threshold, weights, 0.0)
    return torch.where(highest.isfinite().squeeze(-1), _inverse_cdf(weights, batch.uniforms), INVALID_TOKEN)


def _descending_candidates(scaled: Tensor, batch: SamplingBatch) -> Tensor:
    """[N, C] largest values per row, descending: enough for every top-k, and usually for the nucleus."""
    num_tokens = scaled.shape[-1]
    wanted = max(batch.max_top_k, _NUCLEUS_CANDIDATES if batch.top_p is not None else 0)
    if wanted == 0:
        return scaled[:, :0]
    if scaled.device.type != "cpu":
        if (
            batch.top_p is not None
        ):  # no look at the host to see whether candidates suffice, so sort everything
            return scaled.sort(dim=-1, descending=True).values
        return scaled.topk(min(wanted, num_tokens), dim=-1).values
    if wanted <= min(_TOPK_LIMIT, num_tokens):
        return scaled.topk(wanted, dim=-1).values
    return _sort_descending(scaled, wanted)


def _sort_descending(scaled: Tensor, count: int) -> Tensor:
    """CPU: the ``count`` largest values per row; numpy sorts bare values 5x faster than torch.sort."""
    values = scaled.numpy()
    start = values.shape[-1] - count
    if start > 0:
        values = np.partition(values, start, axis=-1)[:, start:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _top_k_threshold(candidates: Tensor, top_k: Tensor, threshold: Tensor | None) -> Tensor:
    kth = candidates.gather(-1, (top_k - 1).clamp_min(0).unsqueeze(-1))
    kth = torch.where(top_k.unsqueeze(-1) > 0, kth, -torch.inf)
    return kth if threshold is None else torch.maximum(kth, threshold)


def _top_p_threshold(
    scaled: Tensor, weights: Tensor, candidates: Tensor, top_p: Tensor, threshold: Tensor | None
) -> Tensor:
    """[N, 1]: the larger of ``threshold`` and the value of the last token of the nucleus, that is, of the
    fewest most likely tokens (among those above ``threshold``) whose probabilities sum to at least
    ``top_p``."""
    if threshold is not None:
        weights = torch.where(scaled >= threshold, weights, 0.0)
        candidates = torch.where(candidates >= threshold, candidates, -torch.inf)
    target = weights.sum(dim=-1, dtype=torch.float64) * top_p
    value, fits = _nucleus_edge(candidates, target)
    if scaled.device.type == "cpu":
        fits |= top_p == 1.0
        for count in (_MORE_CANDIDATES, scaled.shape[-1]):
            rest = (~fits).nonzero().squeeze(-1)
            if rest.numel() == 0:
                break
            candidates = _sort_descending(scaled[rest], count)
            if threshold is not None:
                candidates = torch.where(candidates >= threshold[rest], candidates, -torch.inf)
            value[rest], fits[rest] = _nucleus_edge(candidates, target[rest])
    value = torch.where(top_p < 1.0, value, -torch.inf).unsqueeze(-1)
    return value if threshold is None else torch.maximum(value, threshold)


def _nucleus_edge(descending: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[N] value of the last token of the nucleus; [N] whether ``descending`` [N, C] reaches ``target``."""
    mass = descending.exp().cumsum(dim=-1, dtype=torch.float64)
    last = (mass < target.unsqueeze(-1)).sum(dim=-1)
    value = descending.gather(-1, last.clamp_max(descending.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return value, last < descending.shape[-1]


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """int64 [N]: index drawn in proportion to ``weights`` float32 [N, V] by ``uniforms`` float64 [N, 1].

    Two levels: only V/256 block sums and one block per row go through a (float64) cumulative sum.
    """
    N, V = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -V % _BLOCK)).view(N, -1, _BLOCK)
    block_ends = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, target, right=True).clamp_max(block_ends.shape[-1] - 1)
    before = torch.where(block > 0, block_ends.gather(-1, (block - 1).clamp_min(0)), 0.0)
    inside = blocks[torch.arange(N, device=weights.device), block.squeeze(-1)]
    ends = inside.cumsum(dim=-1, dtype=torch.float64)
    # Rounding may put the target at the very end of the block; stay on the last token that has any weight.
    target = torch.minimum(target - before, ends[:, -1:] * (1.0 - 2.0**-53))
    offset = torch.searchsorted(ends, target, right=True)
    return (block * _BLOCK + offset).squeeze(-1)
