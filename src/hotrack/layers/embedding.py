"""Token embedding and output head, split over the vocabulary."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from hotrack.kernels.base import Kernel
from hotrack.layers.base import Build, Layer
from hotrack.layers.shard import Shard


class VocabParallel(Layer):
    """A [vocabulary, hidden] matrix; each rank holds ``ceil(vocabulary / size)`` rows, the last ones
    unused."""

    def __init__(self, vocab_size: int, hidden_size: int, build: Build) -> None:
        super().__init__(build)
        self.vocab_size = vocab_size
        self.local = -(-vocab_size // self.tp.size)
        self.first = min(self.tp.rank * self.local, vocab_size)
        self.last = min(self.first + self.local, vocab_size)
        self.weight = self.declare(self.local, hidden_size)

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        return (Shard("", (slice(0, self.last - self.first),), (slice(self.first, self.last),)),)


class VocabParallelEmbedding(VocabParallel):
    """Rows by token id."""

    def bind(self) -> None:
        self.table = self.weight.data

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, D]"""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.table)
        mine = (input_ids >= self.first) & (input_ids < self.last)
        rows = F.embedding((input_ids - self.first).clamp(0, self.local - 1), self.table)
        return self.tp.all_reduce(rows * mine[:, None])


class ParallelLMHead(VocabParallel):
    """Logits over the whole vocabulary, on every rank."""

    def bind(self) -> None:
        self.kernel = self.ops.linear(self.weight.data)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> float32 [R, vocab_size]"""
        return self.tp.all_gather(self.kernel.to_float(hidden))[:, : self.vocab_size]
