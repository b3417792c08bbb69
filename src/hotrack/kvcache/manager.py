"""Blocks for sequences: block tables per slot, prefix hits, growth and release over all cache groups of a
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotrack.core.errors import CheckpointError
from hotrack.kvcache.block_pool import BlockPool
from hotrack.kvcache.prefix_cache import PrefixCache, TokenArray, extend_hashes
from hotrack.kvcache.spec import CacheGroup, Paged


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """``blocks[g]``: cached blocks of group g, in order; ``num_tokens``: prompt tokens they cover."""

    blocks: tuple[tuple[int, ...], ...]
    num_tokens: int


class _Group:
    """One cache group's pool, prefix cache and block tables."""

    def __init__(self, group: CacheGroup, num_blocks: int, num_slots: int, max_blocks: int) -> None:
        self.block_tokens = group.tokens_per_block
        self.prefix = PrefixCache()
        self.pool = BlockPool(num_blocks, on_evict=self.prefix.forget)
        self.table: NDArray[np.int32] = np.zeros((num_slots, max_blocks), np.int32)
        self.held = [0] * num_slots
        self.named = [0] * num_slots


class KVCacheManager:
    """Every group has ``num_blocks`` blocks and an int32 block table ``[num_slots, max_blocks]``
    (``tables[g]``).

    A *slot* is a running sequence's row. The caller admits a slot with a prefix hit, grows it before each
    step, names its full blocks once their tokens are known, and releases it. A block named while its step
    is still in flight may be hit by a later step, or by the same one: steps run in order on the device, and
    a layer writes all K and V of a step before it reads any.

    Raises:
        CheckpointError: a layer needs a cache kind that is not served yet.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        num_slots: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        salt: bytes = b"",
    ) -> None:
        for group in groups:
            check_supported(group)
        self.num_blocks = num_blocks
        self.block_tokens = groups[0].tokens_per_block
        max_blocks = self.blocks_for(max_model_len)
        self._groups = [_Group(group, num_blocks, num_slots, max_blocks) for group in groups]
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
    def capacity_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of blocks referenced by sequences, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.capacity_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy in one group."""
        return -(-num_tokens // self.block_tokens)

    def held(self, slot: int) -> int:
        """Blocks per group that ``slot`` holds."""
        return self._groups[0].held[slot]

    def named(self, slot: int) -> int:
        """Leading blocks of ``slot`` that were offered to the prefix cache."""
        return self._groups[0].named[slot]

    def exclusive(self, slot: int) -> int:
        """Blocks that releasing ``slot`` would make available (those no other slot shares)."""
        group = self._groups[0]
        blocks = group.table[slot, : group.held[slot]].tolist()
        return sum(group.pool.ref_count(block) == 1 for block in blocks)

    def live_blocks(self) -> list[NDArray[np.int64]]:
        """Per group, ascending: the blocks that sequences hold."""
        return [group.pool.used() for group in self._groups]

    def lookup(self, tokens: TokenArray, hashes: list[bytes]) -> PrefixHit:
        """Longest cached prefix of ``tokens`` (int32 ``[n]``); extends ``hashes`` to all full blocks of it.

        At least the last token is left to compute, since its logits are needed: a full hit gives up its
        last block.
        """
        if not self._caching:
            return PrefixHit(tuple(() for _ in self._groups), 0)
        extend_hashes(hashes, tokens, self.block_tokens, self._salt)
        usable = hashes[: (len(tokens) - 1) // self.block_tokens]
        matches = [group.prefix.match(usable) for group in self._groups]
        length = min(len(match) for match in matches)
        return PrefixHit(tuple(tuple(match[:length]) for match in matches), length * self.block_tokens)

    def missing(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks it takes to hold ``num_tokens`` after ``hit`` (a hit on a cached-free block uses one
        up too).
        """
        new = self.blocks_for(num_tokens) - len(hit.blocks[0])
        revived = max(
            sum(group.pool.ref_count(block) == 0 for block in blocks)
            for group, blocks in zip(self._groups, hit.blocks, strict=True)
        )
        return new + revived

    def admit(self, slot: int, hit: PrefixHit) -> None:
        """Give ``slot`` the blocks of its prefix hit."""
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            assert group.held[slot] == 0, f"{slot=} still holds blocks"
            for block in blocks:
                group.pool.acquire(block)
            group.table[slot, : len(blocks)] = blocks
            group.held[slot] = group.named[slot] = len(blocks)

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make ``slot`` hold ``num_tokens`` tokens; False (and nothing changed) when blocks are short."""
        needed = self.blocks_for(num_tokens)
        short = needed - self._groups[0].held[slot]
        if short <= 0:
            return True
        if short > self.num_free_blocks:
            return False
        for group in self._groups:
            group.table[slot, group.held[slot] : needed] = group.pool.allocate(short)
            group.held[slot] = needed
        return True

    def name_blocks(self, slot: int, tokens: TokenArray, hashes: list[bytes]) -> None:
        """Enter the full blocks of ``tokens`` (known and computed, int32 ``[n]``) into the prefix cache."""
        full = len(tokens) // self.block_tokens
        if not self._caching or full <= self._groups[0].named[slot]:
            return
        extend_hashes(hashes, tokens, self.block_tokens, self._salt)
        for group in self._groups:
            first = group.named[slot]
            for index, block in enumerate(group.table[slot, first:full].tolist(), first):
                if group.prefix.insert(hashes[index], block):
                    group.pool.mark_cached(block)
            group.named[slot] = full

    def release(self, slot: int) -> None:
        """Give back everything ``slot`` holds."""
        for group in self._groups:
            group.pool.release(reversed(group.table[slot, : group.held[slot]].tolist()))
            group.table[slot, : group.held[slot]] = 0
            group.held[slot] = group.named[slot] = 0

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running sequences keep their blocks."""
        for group in self._groups:
            group.prefix.clear()
            group.pool.forget_cached()


def check_supported(group: CacheGroup) -> None:
    """Raises CheckpointError when the group's cache kind is not served yet."""
    if not isinstance(group.spec, Paged) or group.spec.ratio != 1:
        raise CheckpointError(
            f"layers {group.layers} need cache kind {group.spec}; this version serves Paged(ratio=1) only. "
            "Use a model with full attention in every layer.",
            code="unsupported_cache_kind",
        )
