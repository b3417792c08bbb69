"""Linear layers split over the ranks of a tensor-parallel group (Shoeybi et al., 2019, Megatron-LM)."""

from collections.abc import Iterator

from torch import Tensor

from hotrack.kernels.base import Kernel
from hotrack.kernels.paged import HeadShape
from hotrack.layers.base import Build, Layer, bias_of
from hotrack.layers.shard import WHOLE, Shard, divide, span


class QKVParallelLinear(Layer):
    """Query, key and value projections as one matrix, split by head.

    K/V heads are replicated when there are fewer of them than ranks. ``gated``: the query projection also
    makes a gate for each head's output, published after each head's query; here all gates come last.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        build: Build,
        *,
        gated: bool = False,
    ) -> None:
        super().__init__(build)
        size = self.tp.size
        heads = divide(num_heads, size, "attention heads")
        if num_kv_heads >= size:
            kv_heads, self.kv_rank = divide(num_kv_heads, size, "key/value heads"), self.tp.rank
        else:
            kv_heads, self.kv_rank = (
                1,
                self.tp.rank // divide(size, num_kv_heads, "ranks over key/value heads"),
            )
        self.heads = HeadShape(heads, kv_heads, head_dim)
        self.gated = gated
        rows = (heads + 2 * kv_heads + (heads if gated else 0)) * head_dim
        self.weight = self.declare(rows, hidden_size)
        self.bias = self.declare(rows) if bias else None

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        q, kv = self.heads.num_heads * self.heads.head_dim, self.heads.num_kv_heads * self.heads.head_dim
        queries = (
            self._gated_heads(q + 2 * kv)
            if self.gated
            else (Shard("q", (slice(0, q),), (span(self.tp.rank, q),)),)
        )
        return (
            *queries,
            Shard("k", (slice(q, q + kv),), (span(self.kv_rank, kv),)),
            Shard("v", (slice(q + kv, q + 2 * kv),), (span(self.kv_rank, kv),)),
        )

    def _gated_heads(self, first_gate: int) -> tuple[Shard, ...]:
        count, d = self.heads.num_heads, self.heads.head_dim
        found = []
        for head in range(count):
            published = 2 * (self.tp.rank * count + head)
            gate = slice(first_gate + head * d, first_gate + (head + 1) * d)
            found.append(Shard("q", (span(head, d),), (span(published, d),)))
            found.append(Shard("q", (gate,), (span(published + 1, d),)))
        return tuple(found)

    def bind(self) -> None:
        self.kernel = self.ops.linear(self.weight.data, bias_of(self.bias))

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, (num_heads + 2 * num_kv_heads) * head_dim], q heads then k heads then v heads; then
        num_heads * head_dim gates, if any"""
        return self.kernel(x)


class GateUpParallelLinear(Layer):
    """SwiGLU's two input projections as one matrix, with the activation: silu(gate(x)) * up(x)."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, build: Build) -> None:
        super().__init__(build)
        self.local = divide(intermediate_size, self.tp.size, "intermediate channels")
        self.weight = self.declare(2 * self.local, hidden_size)
        self.bias = self.declare(2 * self.local) if bias else None

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        select = (span(self.tp.rank, self.local),)
        return (
            Shard("gate", (slice(0, self.local),), select),
            Shard("up", (slice(self.local, 2 * self.local),), select),
        )

    def bind(self) -> None:
        self.kernel = self.ops.gate_up(self.weight.data, bias_of(self.bias))

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, local intermediate]"""
        return self.kernel(x)


class RowParallelLinear(Layer):
    """Input split over ranks; the partial results are summed. The residual and the bias join once."""

    def __init__(self, in_size: int, out_size: int, bias: bool, build: Build) -> None:
        super().__init__(build)
        self.local = divide(in_size, self.tp.size, "input channels")
        self.weight = self.declare(out_size, self.local)
        self.bias = self.declare(out_size) if bias else None

    def shards(self, name: str) -> tuple[Shard, ...]:
        if name == "bias":
            return WHOLE
        return (Shard("", (), (slice(None), span(self.tp.rank, self.local))),)

    def bind(self) -> None:
        # With several ranks only the first adds the bias, or the sum would hold it size times.
        bias = bias_of(self.bias) if self.tp.rank == 0 else None
        self.kernel = self.ops.linear(self.weight.data, bias)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def partial(self, x: Tensor) -> Tensor:
        """x [T, local in] -> this rank's part of the sum [T, out]"""
        return self.kernel(x)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, local in], residual [T, out] -> residual + x @ weight.T [T, out]"""
        if self.tp.size == 1:
            return self.kernel.add(x, residual)
        return self.tp.all_reduce(self.kernel(x)).add_(residual)


class ReplicatedLinear(Layer):
    """The same matrix on every rank."""

    def __init__(self, in_size: int, out_size: int, build: Build) -> None:
        super().__init__(build)
        self.weight = self.declare(out_size, in_size)

    def bind(self) -> None:
        self.kernel = self.ops.linear(self.weight.data)

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        yield "weight", self.kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]"""
        return self.kernel(x)
