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
from hotrack.engine.sampling_batch import Penalties, RandomRows, SamplingBatch, SparseBias

INVALID_TOKEN = -1
_ROWS_AT_ONCE = 8
_BLOCK = 256  # tokens per block of the two-level cumulative sum
_TIES = 16  # candidates beyond top_k, for tokens tied with the last one
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

    def to_host(self) -> "LogprobsTensors":
        """On the host; a GPU's arrive there later, when what was launched before this call is done."""
        return LogprobsTensors(
            *(x.to("cpu", non_blocking=True) for x in (self.token_ids, self.logprobs, self.ranks))
        )

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
        if batch.num_random < batch.num_rows:
            highest, tokens = processed.max(dim=-1)
            tokens = torch.where(highest.isfinite(), tokens, INVALID_TOKEN)
        else:
            tokens = torch.empty(batch.num_rows, dtype=torch.int64, device=logits.device)
        for group in batch.random:
            if group.rows is None:
                tokens = _sample(processed, group)
            else:
                tokens[group.rows] = _sample(processed[group.rows], group)
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
    x = logits[penalties.rows, penalties.tokens]
    counts = penalties.output_counts
    x = x * torch.where(x > 0, 1.0 / penalties.repetition, penalties.repetition)
    x = x - penalties.frequency * counts - penalties.presence * (counts > 0)
    return logits.index_put((penalties.rows, penalties.tokens), x)


def _sampled_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> LogprobsTensors | None:
    rows = batch.logprobs_rows
    if rows is None:
        return None
    if rows.shape[0] == batch.num_rows:
        return compute_logprobs(logits, tokens, batch.num_logprobs)
    return compute_logprobs(logits[rows], tokens[rows], batch.num_logprobs)


def _sample(logits: Tensor, group: RandomRows) -> Tensor:
    """int64 [N] for float32 [N, V]."""
    if logits.device.type != "cpu":
        return _sample_vocabulary(logits, group)
    if not group.few_candidates:
        # A few rows at a time, so that the passes over the vocabulary find their operands in the cache.
        steps = range(0, logits.shape[0], _ROWS_AT_ONCE)
        parts = [slice(start, start + _ROWS_AT_ONCE) for start in steps]
        return torch.cat([_sample_vocabulary(logits[part], group.take(part)) for part in parts])
    tokens, unsure = _sample_candidates(logits, group)
    rest = unsure.nonzero().squeeze(-1)  # on other devices this look at the host would stall the queue
    if rest.numel():
        tokens[rest] = _sample_vocabulary(logits[rest], group.take(rest))
    return tokens


def _sample_candidates(logits: Tensor, group: RandomRows) -> tuple[Tensor, Tensor]:
    """Rows with a small top_k: draw from their ``top_k`` best tokens alone.

    Returns int64 [N] tokens and bool [N]: more tokens are tied with the last one than there were candidates.
    """
    assert group.top_k is not None, f"{group.max_top_k=}"
    count = min(group.max_top_k + _TIES, logits.shape[-1])
    values, ids = logits.topk(count, dim=-1)
    kth = values.gather(-1, group.top_k - 1)
    weights = ((values - values[:, :1]) / group.temperature).double().exp()
    keep = values >= kth
    if group.log_min_p is not None:
        keep &= weights >= group.log_min_p.exp()
    weights = torch.where(keep, weights, 0.0)
    if group.top_p is not None:
        mass = weights.cumsum(dim=-1)
        last = (mass < mass[:, -1:] * group.top_p).sum(dim=-1, keepdim=True)
        weights = torch.where(values >= values.gather(-1, last), weights, 0.0)
    ids, order = ids.sort(dim=-1)
    ends = weights.gather(-1, order).cumsum(dim=-1)
    drawn = torch.searchsorted(ends, group.uniforms * ends[:, -1:], right=True)
    tokens = ids.gather(-1, drawn.clamp_max(count - 1)).squeeze(-1)
    unsure = (values[:, -1:] >= kth).squeeze(-1) & (count < logits.shape[-1])
    return torch.where(values[:, 0].isfinite(), tokens, INVALID_TOKEN), unsure


def _sample_vocabulary(logits: Tensor, group: RandomRows) -> Tensor:
    """int64 [N]: draw from the whole vocabulary, cut by one threshold per row."""
    highest = logits.amax(dim=-1, keepdim=True)
    # Subtracting the maximum first keeps a tiny temperature from overflowing: the best token is at exactly 0.
    scaled = (logits - highest).div_(group.temperature)
    weights = scaled.exp()
    threshold = group.log_min_p
    if group.top_k is not None:
        kth = _descending(scaled, group.max_top_k).gather(-1, (group.top_k - 1).clamp_min(0))
        threshold = _larger(torch.where(group.top_k > 0, kth, -torch.inf), threshold)
    if group.top_p is not None:
        threshold = _larger(_nucleus_threshold(scaled, weights, group.top_p, threshold), threshold)
    if threshold is not None:
        weights = _above(weights, scaled, threshold)
    return torch.where(highest.isfinite().squeeze(-1), _inverse_cdf(weights, group.uniforms), INVALID_TOKEN)


def _above(weights: Tensor, scaled: Tensor, threshold: Tensor) -> Tensor:
    """``weights`` where ``scaled >= threshold``, else 0. On CPU a float mask is 4x faster than
    ``torch.where``."""
    return torch.ge(scaled, threshold, out=torch.empty_like(weights)).mul_(weights)


def _larger(a: Tensor, b: Tensor | None) -> Tensor:
    return a if b is None else torch.maximum(a, b)


def _descending(scaled: Tensor, count: int) -> Tensor:
    """[N, count] largest values per row, descending."""
    if scaled.device.type != "cpu" or count <= _TOPK_LIMIT:
        return scaled.topk(min(count, scaled.shape[-1]), dim=-1).values
    return _sort_descending(scaled, count)


def _sort_descending(scaled: Tensor, count: int) -> Tensor:
    """CPU: the ``count`` largest values per row; numpy sorts bare values 5x faster than torch.sort."""
    values = scaled.numpy()
    start = values.shape[-1] - count
    if start > 0:
        values = np.partition(values, start, axis=-1)[:, start:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _nucleus_threshold(scaled: Tensor, weights: Tensor, top_p: Tensor, threshold: Tensor | None) -> Tensor:
    """[N, 1]: value of the last token of the nucleus, that is, of the fewest most likely tokens (among
    those at or above ``threshold``) whose probabilities sum to at least ``top_p``; -inf where ``top_p`` is
    1."""
    if threshold is not None:
        weights = _above(weights, scaled, threshold)
    target = weights.sum(dim=-1, keepdim=True, dtype=torch.float64) * top_p
    if scaled.device.type != "cpu":  # asking the host what fits would stall the queue
        edge = _nucleus_edge(scaled.sort(dim=-1, descending=True).values, target)[0]
        return torch.where(top_p < 1.0, edge, -torch.inf)
    value, done = torch.full_like(scaled[:, :1], -torch.inf), (top_p == 1.0).squeeze(-1)
    for count in (_NUCLEUS_CANDIDATES, _MORE_CANDIDATES, scaled.shape[-1]):
        rest = (~done).nonzero().squeeze(-1)
        if rest.numel() == 0:
            break
        rows = scaled if rest.numel() == scaled.shape[0] else scaled[rest]
        value[rest], fits = _nucleus_edge(_descending(rows, count), target[rest])
        done[rest] = fits.squeeze(-1)
    return value


def _nucleus_edge(descending: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 1] value of the last token of the nucleus; [N, 1] whether ``descending`` reaches ``target``."""
    mass = descending.exp().cumsum(dim=-1, dtype=torch.float64)
    last = (mass < target).sum(dim=-1, keepdim=True)
    return descending.gather(-1, last.clamp_max(descending.shape[-1] - 1)), last < descending.shape[-1]


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
