"""How the bytes for KV are split between cache groups (no torch)."""

from collections.abc import Sequence

from hotrack.kvcache.holdings import window_blocks
from hotrack.kvcache.spec import CacheGroup, OpenGroup, Paged, State


def split_blocks(
    groups: Sequence[CacheGroup], budget: int, *, max_num_seqs: int, max_model_len: int, max_step_tokens: int
) -> list[int]:
    """Blocks of each group, the null block included; of paged groups as many as the rest of ``budget`` bytes
    pays for, but at least 0.

    Groups that do not grow with the context get what ``max_num_seqs`` sequences need, and as much again for
    the prefix cache; with less memory, what a half, a quarter, ... of the sequences need: so few that these
    groups take at most half of it, or that whole contexts of as many sequences fit beside them. They always
    get what one sequence cannot do without.
    """
    context = -(-max_model_len // groups[0].tokens_per_block)
    most = max_num_seqs * context + 1  # more could never be used at once
    step_tokens = min(max_step_tokens, max_model_len)
    row_bytes = sum(group.row_bytes for group in groups if isinstance(group.spec, Paged))
    seqs = max_num_seqs
    while True:
        fixed = [_fixed_blocks(group, seqs, context, step_tokens) for group in groups]
        nbytes = sum(n * group.row_bytes for n, group in zip(fixed, groups, strict=True))
        if not seqs or nbytes <= max(budget // 2, budget - (seqs * context + 1) * row_bytes):
            break
        seqs //= 2
    blocks = min(max(0, budget - nbytes) // row_bytes, most) if row_bytes else 0
    return [blocks if isinstance(g.spec, Paged) else n for n, g in zip(fixed, groups, strict=True)]


def _fixed_blocks(group: CacheGroup, seqs: int, context: int, step_tokens: int) -> int:
    """For ``seqs`` sequences and their prefixes; with 0, for one without any."""
    spec, alone = group.spec, seqs == 0
    if isinstance(spec, Paged):
        return 0
    if isinstance(spec, OpenGroup) and not spec.overlap:
        return 1 + max(1, 2 * seqs)
    if isinstance(spec, State):
        # Next to the state it writes, a sequence may have one that it reads and a snapshot.
        return 1 + 3 if alone else 1 + 4 * seqs
    one = min(window_blocks(spec, group.tokens_per_block, 1), context)
    chunk = min(window_blocks(spec, group.tokens_per_block, step_tokens), context + 1)
    return 1 + chunk + (0 if alone else 2 * seqs * one)
