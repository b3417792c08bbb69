"""Experts behind the slot table."""

import torch

from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.ops import select_ops
from hotrack.layers.base import Build
from hotrack.modelspec import MoeSpec
from hotrack.moe.block import SparseMoE


def block() -> SparseMoE:
    build = Build(select_ops(torch.device("cpu")), TensorParallel(), torch.float32)
    moe = SparseMoE(16, MoeSpec(6, 2, 12, True, (0,)), build)
    generator = torch.Generator().manual_seed(0)
    for param in moe.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator))
    for layer in (moe.gate, moe.experts):
        layer.bind()
    return moe


def test_moving_an_expert_is_a_copy_and_a_table_write() -> None:
    moe, x = block(), torch.randn(9, 16)
    want = moe(x, x)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    experts = moe.experts
    experts.gate_up_proj.data[order] = experts.gate_up_proj.data.clone()
    experts.down_proj.data[order] = experts.down_proj.data.clone()
    assert not torch.allclose(moe(x, x), want, atol=1e-3)
    experts.slot_of[:] = order
    assert torch.allclose(moe(x, x), want, atol=1e-5)


def test_the_residual_joins_once() -> None:
    moe, x = block(), torch.randn(3, 16)
    assert torch.allclose(moe(x, x + 1) - moe(x, x), torch.ones(3, 16), atol=1e-5)
