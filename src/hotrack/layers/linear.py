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
    ``value_dim``: width of a value head, if it is not ``head_dim``. ``fused``: the three are published as one
    tensor, see ``ModelSpec.fused_qkv``.
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
        value_dim: int | None = None,
        fused: int = 0,
    ) -> None:
        super().__init__(build)
        size = self.tp.size
        self.all_heads, self.all_kv_heads, self.fused = num_heads, num_kv_heads, fused
        heads = divide(num_heads, size, "attention heads")
        if num_kv_heads >= size:
            kv_heads, self.kv_rank = divide(num_kv_heads, size, "key/value heads"), self.tp.rank
        else:
            kv_heads, self.kv_rank = (
                1,
                self.tp.rank // divide(size, num_kv_heads, "ranks over key/value heads"),
            )
        self.heads = HeadShape(heads, kv_heads, head_dim, value_dim)
        self.gated = gated
        rows = (heads + kv_heads + (heads if gated else 0)) * head_dim + kv_heads * self.heads.v_dim
        self.weight = self.declare(rows, hidden_size)
        self.bias = self.declare(rows) if bias else None

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        q, k = self.heads.num_heads * self.heads.head_dim, self.heads.num_kv_heads * self.heads.head_dim
        v = self.heads.num_kv_heads * self.heads.v_dim
        if self.fused:
            return self._fused_heads()
        queries = (
            self._gated_heads(q + k + v)
            if self.gated
            else (Shard("q", (slice(0, q),), (span(self.tp.rank, q),)),)
        )
        return (
            *queries,
            Shard("k", (slice(q, q + k),), (span(self.kv_rank, k),)),
            Shard("v", (slice(q + k, q + k + v),), (span(self.kv_rank, v),)),
        )

    def _fused_heads(self) -> tuple[Shard, ...]:
        """Head by head out of the parts that the publisher dealt out."""
        q, kv = self.all_heads // self.fused, self.all_kv_heads // self.fused  # heads of a part
        d, v_dim = self.heads.head_dim, self.heads.v_dim
        part_rows = (q + kv) * d + kv * v_dim
        # (heads here, their rank, heads of a part, width, first row in a part)
        kinds = (
            (self.heads.num_heads, self.tp.rank, q, d, 0),
            (self.heads.num_kv_heads, self.kv_rank, kv, d, q * d),
            (self.heads.num_kv_heads, self.kv_rank, kv, v_dim, (q + kv) * d),
        )
        found, row = [], 0
        for count, rank, per_part, width, first in kinds:
            for head in range(rank * count, (rank + 1) * count):
                part, within = divmod(head, per_part)
                start = part * part_rows + first + within * width
                found.append(Shard("qkv", (slice(row, row + width),), (slice(start, start + width),)))
                row += width
        return tuple(found)

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
        """x [T, D] -> [T, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim], q heads then k
        heads then v heads; then num_heads * head_dim gates, if any"""
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
