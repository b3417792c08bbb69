"""Blocks for sequences: block tables per slot, prefix hits, growth and release over all cache groups of a
model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrack.kvcache.holdings import Holdings, Int64Array, StateHoldings, StepTables, hold
from hotrack.kvcache.prefix_cache import TokenArray, extend_hashes
from hotrack.kvcache.spec import CacheGroup, Paged


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """``blocks[g]``: what the hit takes from group g (blocks in order, the null block where a window does not
    reach; one row of a group of states); ``num_tokens``: prompt tokens they cover.
    """

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int


class KVCacheManager:
    """Every group has its own number of blocks and int32 table ``[num_slots, n]`` (``tables[g]``), but all of
    them count blocks of ``block_tokens`` tokens.

    A *slot* is a running sequence's row. The caller admits a slot with a prefix hit, grows it before each
    step, names its full blocks once their tokens are known, and releases it. A block named while its step
    is still in flight may be hit by a later step, or by the same one: steps run in order on the device, and
    a layer writes all K and V of a step before it reads any. A state is named no earlier than the step after
    the one that writes it.

    num_blocks       of each group; one number: the same for all
    max_step_tokens  most new tokens of a sequence in one step (None: a whole context)
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int | Sequence[int],
        *,
        num_slots: int,
        max_model_len: int,
        max_step_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        salt: bytes = b"",
    ) -> None:
        counts = [num_blocks] * len(groups) if isinstance(num_blocks, int) else list(num_blocks)
        self.block_tokens = groups[0].tokens_per_block
        width = self.blocks_for(max_model_len)
        step_tokens = min(max_step_tokens or max_model_len, max_model_len)
        self._groups: list[Holdings] = [
            hold(group, count, num_slots, width, step_tokens, enable_prefix_caching)
            for group, count in zip(groups, counts, strict=True)
        ]
        growing = [
            g.pool for g, group in zip(self._groups, groups, strict=True) if isinstance(group.spec, Paged)
        ]
        self.capacity_blocks = min((pool.capacity for pool in growing), default=width)
        self.keeps_states = any(isinstance(g, StateHoldings) and g.snapshots for g in self._groups)
        self._named = [0] * num_slots
        self._caching = enable_prefix_caching
        self._salt = salt

    @property
    def tables(self) -> list[NDArray[np.int32]]:
        return [group.table for group in self._groups]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out in every group."""
        return min(group.pool.num_free for group in self._groups)

    @property
    def usage(self) -> float:
        """Share of blocks referenced by sequences in the fullest group, 0 to 1."""
        return max(1.0 - group.pool.num_free / group.pool.capacity for group in self._groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_tokens)

    def live_blocks(self) -> list[NDArray[np.int64]]:
        """Per group, ascending: the blocks that sequences hold."""
        return [group.pool.used() for group in self._groups]

    def lookup(self, tokens: TokenArray, hashes: list[bytes]) -> PrefixHit:
        """Longest cached prefix of ``tokens`` (int32 ``[n]``) that every group can continue; extends
        ``hashes`` to all full blocks of it.

        At least the last token is left to compute, since its logits are needed: a full hit gives up its
        last block.
        """
        if not self._caching:
            return PrefixHit(tuple(() for _ in self._groups), 0)
        extend_hashes(hashes, tokens, self.block_tokens, self._salt)
        count, before = max(0, len(tokens) - 1) // self.block_tokens, -1
        while count != before:
            before = count
            for group in self._groups:
                count = group.longest_hit(hashes, count)
        blocks = tuple(group.hit_blocks(hashes, count) if count else () for group in self._groups)
        return PrefixHit(blocks, count * self.block_tokens)

    def can_admit(self, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether there are blocks for a sequence of ``num_tokens`` after ``hit`` (a hit on a cached-free
        block uses one up, too).
        """
        return all(
            group.new_blocks(num_tokens, hit.num_tokens) + group.revived(blocks) <= group.pool.num_free
            for group, blocks in zip(self._groups, hit.blocks, strict=True)
        )

    def admit(self, slot: int, hit: PrefixHit) -> None:
        """Give ``slot`` the blocks of its prefix hit."""
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            group.admit(slot, blocks, hit.num_tokens)
        self._named[slot] = hit.num_tokens // self.block_tokens

    def can_grow(
        self, slot: int, num_tokens: int, computed: int, *, num_drafts: int = 0, released: Iterable[int] = ()
    ) -> bool:
        """Whether :meth:`grow` would succeed once the slots ``released`` are."""
        others = list(released)
        return all(
            group.short(slot, num_tokens, computed, num_drafts)
            <= group.pool.num_free + sum(group.exclusive(other) for other in others)
            for group in self._groups
        )

    def grow(self, slot: int, num_tokens: int, computed: int, *, num_drafts: int = 0) -> bool:
        """The next step takes ``slot`` from ``computed`` to ``num_tokens`` tokens, of which the last
        ``num_drafts`` may be rewound; False (and nothing changed) when blocks are short. Once per step.
        """
        if not self.can_grow(slot, num_tokens, computed, num_drafts=num_drafts):
            return False
        for group in self._groups:
            group.grow(slot, num_tokens, computed, num_drafts)
        return True

    def rewind(self, slot: int, num_tokens: int) -> int:
        """Only ``num_tokens`` of the tokens computed so far count; at most the drafts of the last step do
        not. Returns the position that the next step starts from: ``num_tokens``, or, where a state cannot be
        taken back token by token, that of the last step.
        """
        start = min(group.rewind(slot, num_tokens) for group in self._groups)
        for group in self._groups:
            group.rewind(slot, start)  # one that could have gone on later follows
        return start

    def can_name(self, slot: int, num_tokens: int) -> bool:
        """Whether :meth:`name_blocks` has something to do for ``slot`` with ``num_tokens`` known tokens."""
        return self._caching and (
            num_tokens // self.block_tokens > self._named[slot]
            or any(group.has_unnamed(slot, num_tokens) for group in self._groups)
        )

    def name_blocks(self, slot: int, tokens: TokenArray, hashes: list[bytes]) -> None:
        """Enter the full blocks of ``tokens`` (known and computed, int32 ``[n]``) into the prefix cache."""
        if not self.can_name(slot, len(tokens)):
            return
        first, full = self._named[slot], len(tokens) // self.block_tokens
        extend_hashes(hashes, tokens, self.block_tokens, self._salt)
        for group in self._groups:
            group.name(slot, first, full, hashes)
        self._named[slot] = full

    def release(self, slot: int) -> None:
        """Give back everything ``slot`` holds."""
        for group in self._groups:
            group.release(slot)
        self._named[slot] = 0

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        for group in self._groups:
            group.prefix.clear()
            group.pool.forget_cached()

    def step_tables(
        self, slots: Int64Array, token_slots: Int64Array, positions: Int64Array, longest: int
    ) -> list[StepTables]:
        """What each group's layers address in the step just planned (``layers.batch.GroupTables``): ``slots``
        [S] of its sequences, ``token_slots`` and ``positions`` [T] of its tokens, ``longest`` sequence."""
        return [group.step_tables(slots, token_slots, positions, longest) for group in self._groups]
