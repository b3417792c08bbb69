"""Which rows and columns each tensor-parallel rank takes."""

import pytest
import torch

from hotrack.core.errors import ConfigError
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.base import Ops
from hotrack.layers.base import Build, Layer
from hotrack.layers.embedding import ParallelLMHead
from hotrack.layers.linear import GateUpParallelLinear, QKVParallelLinear, RowParallelLinear


def build(rank: int, size: int) -> Build:
    return Build(Ops(), TensorParallel(rank, size), torch.float32)


def filled(layer: Layer, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The layer's weight as its shards fill it; NaN where nothing does."""
    weight = torch.full(layer.weight.shape, torch.nan)
    for shard in layer.shards("weight"):
        weight[shard.dest] = parts[shard.part][shard.select]
    return weight


def test_query_heads_split_and_scarce_kv_heads_replicate() -> None:
    q, k, v = (torch.arange(rows * 2.0).view(rows, 2) + 1000 * i for i, rows in enumerate((32, 8, 8)))
    for rank in range(4):
        with torch.device("meta"):
            layer = QKVParallelLinear(2, 8, 2, 4, False, build(rank, 4))
        weight = filled(layer, {"q": q, "k": k, "v": v})
        kv = slice(rank // 2 * 4, rank // 2 * 4 + 4)  # ranks 0, 1 share K/V head 0; ranks 2, 3 share head 1
        assert torch.equal(weight, torch.cat((q[rank * 8 : rank * 8 + 8], k[kv], v[kv])))


def test_gate_and_up_stay_together() -> None:
    gate, up = torch.arange(12.0).view(6, 2), 100 + torch.arange(12.0).view(6, 2)
    layer = GateUpParallelLinear(2, 6, False, build(1, 2))
    assert torch.equal(filled(layer, {"gate": gate, "up": up}), torch.cat((gate[3:], up[3:])))


def test_row_parallel_takes_columns_and_one_rank_adds_the_bias() -> None:
    full = torch.arange(12.0).view(2, 6)
    layers = [RowParallelLinear(6, 2, True, build(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat([filled(layer, {"": full}) for layer in layers], 1), full)
    for layer in layers:
        layer.bias.data.fill_(5.0)
        layer.weight.data.zero_()
        layer.bind()
    assert sum(layer.kernel(torch.zeros(1, 3)) for layer in layers).tolist() == [[5.0, 5.0]]


def test_vocabulary_that_does_not_divide_leaves_the_last_rank_short() -> None:
    full = torch.arange(10.0).view(5, 2)
    shards = [filled(ParallelLMHead(5, 2, build(rank, 2)), {"": full}) for rank in range(2)]
    assert torch.equal(shards[0], full[:3])
    assert torch.equal(shards[1][:2], full[3:])
    assert shards[1][2:].isnan().all()


def test_a_size_that_does_not_divide_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 cannot split 9 attention heads"):
        QKVParallelLinear(2, 9, 3, 4, False, build(0, 2))
