"""Which block holds which prefix: a map from chained block hashes to blocks.

The hash of a full block is ``xxh3_128(parent_hash + its int32 tokens)``, so one hash names a block *and all
tokens before it*. Tokens are not compared on a hit: with 128 bits, a chance collision among 2**40 blocks
has probability below 2**-48. xxh3 is no cryptographic hash, so the chain starts from a random ``salt``
(drawn once per engine, the same on all ranks): collisions cannot be prepared without knowing it.
"""

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

TokenArray = NDArray[np.int32]


def extend_hashes(hashes: list[bytes], tokens: TokenArray, block_tokens: int, salt: bytes = b"") -> None:
    """Append the hashes of the full blocks of ``tokens`` (int32 ``[n]``) that ``hashes`` does not cover
    yet.
    """
    first, last = len(hashes), len(tokens) // block_tokens
    if first >= last:
        return
    parent = hashes[-1] if hashes else salt
    data = memoryview(tokens[first * block_tokens : last * block_tokens].tobytes())
    stride = 4 * block_tokens
    for start in range(0, len(data), stride):
        hasher = xxhash.xxh3_128(parent)
        hasher.update(data[start : start + stride])
        parent = hasher.digest()
        hashes.append(parent)


class PrefixCache:
    """Hash -> block for one cache group. Knows nothing about reference counts."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def get(self, key: bytes) -> int | None:
        """The block of that name."""
        return self._block_of.get(key)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of ``hashes``."""
        blocks = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> bool:
        """Name ``block``; False when another block already holds the same content (that one stays)."""
        if key in self._block_of:
            return False
        assert block not in self._hash_of, f"{block=} already has a name"
        self._block_of[key] = block
        self._hash_of[block] = key
        return True

    def forget(self, block: int) -> None:
        """The block is about to be overwritten."""
        del self._block_of[self._hash_of.pop(block)]

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()
