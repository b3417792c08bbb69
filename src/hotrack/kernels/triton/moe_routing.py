"""Which experts a token goes to, and the tokens of each expert side by side; all of it on the device.

Buffers have the size of an upper bound, so nothing asks the host how the tokens spread, and a graph replays
for any spread. Places are counted, not claimed by atomics: equal input gives equal bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotrack.kernels.triton.device import dependent, enter

_AT_ONCE = 4096  # choices that a program looks at together
MAX_EXPERTS = 512


@triton.jit(do_not_specialize=["num_tokens"])
def _softmax_topk(
    logits, ids, weights, num_tokens, stride, E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr,
    K2: tl.constexpr, ROWS: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, choice = tl.arange(0, E2), tl.arange(0, K2)
    inside = (token < num_tokens)[:, None] & (expert < E)[None, :]
    place = logits + token.to(tl.int64)[:, None] * stride + expert[None, :]
    x = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    x = tl.where((token < num_tokens)[:, None], x, 0.0)
    x = tl.exp(x - tl.max(x, 1)[:, None])
    x = tl.where((expert < E)[None, :], x / tl.sum(x, 1)[:, None], -1.0)
    chosen = tl.zeros([ROWS, K2], tl.int32)
    value = tl.zeros([ROWS, K2], tl.float32)
    for k in tl.static_range(K):
        best = tl.max(x, 1)
        first = tl.min(tl.where(x == best[:, None], expert[None, :], E2), 1)  # of equal ones
        first = tl.minimum(first, E - 1)  # NaN equals nothing
        chosen = tl.where(choice[None, :] == k, first[:, None], chosen)
        value = tl.where(choice[None, :] == k, best[:, None], value)
        x = tl.where(expert[None, :] == first[:, None], -1.0, x)
    if RENORMALIZE:
        value = value / tl.sum(value, 1)[:, None]
    there = token.to(tl.int64)[:, None] * K + choice[None, :]
    kept = (token < num_tokens)[:, None] & (choice < K)[None, :]
    tl.store(ids + there, chosen, mask=kept)
    tl.store(weights + there, value, mask=kept)


def softmax_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """As ``reference.moe.softmax_topk``, in one launch: logits [T, E] (rows may be apart), E up to
    ``MAX_EXPERTS`` ->
    ids **int32** [T, k], weights float32 [T, k]. Of equal logits the lower id comes first."""
    T, E = logits.shape
    ids = torch.empty(T, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
    if T:
        padded = triton.next_power_of_2(E)
        rows = 1 if T < 512 else max(1, 1024 // padded)
        _softmax_topk[(triton.cdiv(T, rows),)](
            logits, ids, weights, T, logits.stride(0), E=E, E2=padded, K=top_k,
            K2=triton.next_power_of_2(top_k), ROWS=rows, RENORMALIZE=renormalize,
            num_warps=1 if rows == 1 else 4, **dependent(logits),
        )  # fmt: skip
    return ids, weights


@dataclass(frozen=True, slots=True)
class SortedChoices:
    """The T * k choices of a step by expert, each expert's padded to whole blocks of ``block_m``.

    order           int32 [max_blocks * block_m]: flat choice (token * k + i), or T * k where there is none
    block_expert    int32 [max_blocks]: the slot of each block's expert
    num_blocks      int32 [1]: blocks in use; what ``order`` and ``block_expert`` hold beyond is undefined
    """

    order: Tensor
    block_expert: Tensor
    num_blocks: Tensor
    block_m: int

    @property
    def max_blocks(self) -> int:
        return len(self.block_expert)


def max_blocks(choices: int, num_experts: int, block_m: int) -> int:
    """The most blocks that ``choices`` over ``num_experts`` can need: every expert hit pads one block."""
    hit = min(choices, num_experts)
    return (choices + hit * (block_m - 1)) // block_m


@triton.jit
def _slots(ids, table, index, num_choices, TABLE: tl.constexpr):
    inside = index < num_choices
    slot = tl.load(ids + index, mask=inside, other=0).to(tl.int32)
    if TABLE:
        slot = tl.load(table + slot, mask=inside, other=0).to(tl.int32)
    return slot, inside


@triton.jit(do_not_specialize=["num_choices"])
def _sort(
    ids, table, order, block_expert, num_blocks, num_choices, E2: tl.constexpr, N2: tl.constexpr,
    BLOCK_M: tl.constexpr, TABLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per expert: all look at all choices, N2 at a time, and each places its own."""
    enter(PDL)
    mine, expert, lane = tl.program_id(0), tl.arange(0, E2), tl.arange(0, N2)
    counts = tl.zeros([E2], tl.int32)
    for start in range(0, num_choices, N2):
        slot, inside = _slots(ids, table, start + lane, num_choices, TABLE)
        counts += tl.histogram(slot, E2, mask=inside)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(expert < mine, blocks, 0), 0)
    used = tl.sum(tl.where(expert == mine, blocks, 0), 0)
    place = first * BLOCK_M
    for start in range(0, num_choices, N2):
        index = start + lane
        slot, inside = _slots(ids, table, index, num_choices, TABLE)
        match = (inside & (slot == mine)).to(tl.int32)
        tl.store(order + place + tl.cumsum(match, 0) - 1, index, mask=match > 0)
        place += tl.sum(match, 0)
    pad = place + tl.arange(0, BLOCK_M)
    empty = tl.zeros([BLOCK_M], tl.int32) + num_choices
    tl.store(order + pad, empty, mask=pad < (first + used) * BLOCK_M)
    for start in range(0, used, BLOCK_M):
        block = start + tl.arange(0, BLOCK_M)
        owner = tl.zeros([BLOCK_M], tl.int32) + mine
        tl.store(block_expert + first + block, owner, mask=block < used)
    if mine == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))


def sort_choices(ids: Tensor, num_experts: int, block_m: int, table: Tensor | None = None) -> SortedChoices:
    """ids int32 or int64 [T, k] of slots in 0 .. num_experts - 1, or of experts whose slots are in ``table``
    -> its choices by slot, in token order."""
    n, device = ids.numel(), ids.device
    ids = ids.contiguous()
    bound = max_blocks(n, num_experts, block_m)
    order = torch.empty(bound * block_m, dtype=torch.int32, device=device)
    block_expert = torch.empty(bound, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    n2 = min(_AT_ONCE, max(2, triton.next_power_of_2(n)))
    _sort[(num_experts,)](
        ids, ids if table is None else table, order, block_expert, num_blocks, n,
        E2=max(2, triton.next_power_of_2(num_experts)), N2=n2, BLOCK_M=block_m, TABLE=table is not None,
        num_warps=4 if n2 <= 1024 else 8, **dependent(ids),
    )  # fmt: skip
    return SortedChoices(order, block_expert, num_blocks, block_m)
