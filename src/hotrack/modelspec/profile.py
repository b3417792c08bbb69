"""What serving a model takes, as numbers: weights by how they are split, cache by what grows."""

from dataclasses import dataclass
from enum import StrEnum


class Split(StrEnum):
    """How the ranks of a group share weights."""

    WHOLE = "whole"  # every rank holds all of it
    TENSOR = "tensor"  # split over tensor-parallel ranks
    KV_HEADS = "kv_heads"  # split over them until each has one K/V head
    EXPERTS = "experts"  # split over tensor-parallel ranks, or dealt out to expert-parallel ones


@dataclass(frozen=True, slots=True)
class Piece:
    """Weights of one kind: ``num_bytes`` as published, scales included; ``num_parameters`` without them."""

    part: str
    num_parameters: int
    num_bytes: int
    split: Split = Split.WHOLE


@dataclass(frozen=True, slots=True)
class CacheCost:
    """What a request keeps: ``entry_bytes`` for every ``tokens_per_entry`` tokens, and ``request_bytes``
    whatever its length. At most ``max_split`` tensor-parallel ranks share it; more hold copies."""

    entry_bytes: int = 0
    tokens_per_entry: int = 1
    request_bytes: int = 0
    max_split: int = 1

    def num_bytes(self, num_tokens: int) -> int:
        return self.request_bytes + -(-num_tokens // self.tokens_per_entry) * self.entry_bytes


@dataclass(frozen=True, slots=True)
class Limit:
    """A dimension that tensor parallelism splits, into parts that are multiples of ``block``; among at most
    ``max_split`` ranks, of which more hold copies."""

    what: str
    size: int
    block: int = 1
    max_split: int = 1 << 30

    def share(self, ranks: int) -> int:
        """What one of ``ranks`` holds."""
        return self.size // min(ranks, self.max_split)


@dataclass(frozen=True, slots=True)
class Profile:
    """A model before a byte of it is read.

    layers       (kind, how many), in no order
    drafts       blocks that only propose tokens, if they are part of ``pieces``
    unread       the published files may hold draft heads that are no part of ``pieces``
    served       this version runs it
    loaded_dtype what this version keeps weights in, if it is served
    quantisation in words; '' when weights are stored in ``dtype``
    hard         dimensions that tensor parallelism must divide
    soft         dimensions whose parts must be whole blocks to stay quantised
    """

    family: str
    layers: tuple[tuple[str, int], ...]
    dtype: str
    quantisation: str
    pieces: tuple[Piece, ...]
    cache: tuple[CacheCost, ...]
    max_position_embeddings: int
    num_kv_heads: int
    hard: tuple[Limit, ...]
    soft: tuple[Limit, ...] = ()
    num_experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    drafts: int = 0
    unread: bool = False
    served: bool = True
    loaded_dtype: str = "bfloat16"

    @property
    def num_parameters(self) -> int:
        return sum(piece.num_parameters for piece in self.pieces)

    @property
    def num_bytes(self) -> int:
        """Of all weights, as published."""
        return sum(piece.num_bytes for piece in self.pieces)

    def per_gpu(self, tp: int = 1, ep: int = 0, *, bytes_per_parameter: int | None = None) -> int:
        """Bytes of weights on one of ``tp`` tensor-parallel ranks; the experts on one of ``ep``
        expert-parallel ones, if ``ep``. ``bytes_per_parameter``: in such a dtype instead of as published."""
        total = 0
        for piece in self.pieces:
            size = (
                piece.num_bytes if bytes_per_parameter is None else piece.num_parameters * bytes_per_parameter
            )
            total += -(-size // self._ranks(piece.split, tp, ep))
        return total

    def _ranks(self, split: Split, tp: int, ep: int) -> int:
        if split is Split.EXPERTS and ep:
            return ep
        if split is Split.KV_HEADS:
            return min(tp, self.num_kv_heads)
        return 1 if split is Split.WHOLE else tp

    def cache_bytes(self, num_tokens: int, tp: int = 1) -> int:
        """Bytes on one of ``tp`` ranks that a request of ``num_tokens`` keeps."""
        return sum(-(-cost.num_bytes(num_tokens) // min(tp, cost.max_split)) for cost in self.cache)

    def bytes_per_token(self, tp: int = 1) -> float:
        """How much of the cache grows with each token, on one of ``tp`` ranks."""
        return sum(c.entry_bytes / c.tokens_per_entry / min(tp, c.max_split) for c in self.cache)

    def tokens_in(self, num_bytes: int, tp: int = 1) -> int:
        """The longest single request whose cache fits in ``num_bytes`` on each of ``tp`` ranks."""
        low, high = 0, self.max_position_embeddings
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cache_bytes(middle, tp) <= num_bytes else (low, middle - 1)
        return low

    def allows_tensor_parallel(self, size: int) -> bool:
        kv = self.num_kv_heads
        shares = kv % size == 0 or size % kv == 0
        return shares and all(limit.size % size == 0 for limit in self.hard)

    def breaks_blocks(self, size: int) -> Limit | None:
        """What ``size`` ranks would cut inside blocks, so that it cannot stay quantised."""
        return next((limit for limit in self.soft if limit.share(size) % limit.block), None)
