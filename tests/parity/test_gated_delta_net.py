"""One gated DeltaNet layer against transformers' in float32: whole, in chunks, decoding, split over ranks."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from fakes.state_step import state_plan
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.ops import select_ops
from hotrack.layers.base import Build, Layer
from hotrack.layers.gated_delta import GatedDeltaNet
from hotrack.modelspec.parse import parse_config

TOKENS = 150
TOLERANCE = 5e-5  # logits may be 2e-4 apart after all layers


@dataclass
class Reference:
    """transformers' layer, its weights, two inputs [2, TOKENS, D] and its outputs."""

    layer: nn.Module
    x: Tensor
    out: Tensor
    config: dict[str, object]

    def ours(self, tp: TensorParallel | None = None) -> GatedDeltaNet:
        spec = parse_config(self.config)
        assert spec.gated_delta is not None
        build = Build(select_ops(torch.device("cpu")), tp or TensorParallel(), torch.float32)
        layer = GatedDeltaNet(0, spec, spec.gated_delta, build)
        state = self.layer.state_dict()
        for name, param in layer.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = layer.get_submodule(owner)
            assert isinstance(module, Layer)
            param.data.fill_(float("nan"))
            for shard in module.shards(leaf):
                param.data[shard.dest] = state[name][shard.select]
            assert not param.isnan().any()
        for module in layer.modules():
            assert isinstance(module, Layer)
            module.bind()
        return layer


@pytest.fixture(scope="module")
def ref() -> Reference:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=4, linear_num_value_heads=8, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_experts_per_tok=2, num_experts=8,
    )  # fmt: skip
    layer = Qwen3NextGatedDeltaNet(config, 0).eval()
    generator = torch.Generator().manual_seed(1)
    for name, param in layer.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if name == "norm.weight":
            param.data.copy_(1 + 0.2 * noise)
        elif name in ("A_log", "dt_bias"):
            param.data.copy_(noise)
        else:
            param.data.copy_(noise * (2 if "conv" in name else 1.5 * param.shape[-1] ** -0.5))
    x = torch.randn(2, TOKENS, 128, generator=generator)
    with torch.no_grad():
        out = layer(x)
    raw = {k: v for k, v in config.to_dict().items() if v is not None}
    assert out.std() > 0.3
    return Reference(layer, x, out, raw | {"architectures": ["Qwen3NextForCausalLM"]})


class Runner:
    """States of six sequences for one layer; NaN until written."""

    def __init__(self, layer: GatedDeltaNet) -> None:
        heads = layer.heads
        self.layer = layer
        self.inputs = torch.full((6, 3, layer.conv1d.channels), float("nan"))
        self.matrices = torch.full((6, heads.values, heads.key_dim, heads.value_dim), float("nan"))

    @torch.inference_mode()
    def mix(self, work: list[tuple[int, Tensor, bool]]) -> Tensor:
        """(row, inputs [n, D], whether they are the first ones), one-token ones first -> [T, values * dim]"""
        lens = [len(x) for _, x, _ in work]
        plan = state_plan([row for row, _, _ in work], lens, [fresh for _, _, fresh in work])
        return self.layer.mix(torch.cat([x for _, x, _ in work]), self.inputs, self.matrices, plan)

    def step(self, work: list[tuple[int, Tensor, bool]]) -> Tensor:
        mixed = self.mix(work)
        return self.layer.out_proj(mixed, torch.zeros(len(mixed), 128))


def gap(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def test_prefill(ref: Reference) -> None:
    assert gap(Runner(ref.ours()).step([(4, ref.x[0], True)]), ref.out[0]) <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_chunked_prefill(ref: Reference, chunk: int) -> None:
    runner = Runner(ref.ours())
    parts = [runner.step([(2, x, i == 0)]) for i, x in enumerate(ref.x[1].split(chunk))]
    assert gap(torch.cat(parts), ref.out[1]) <= TOLERANCE


def test_mixed_lengths_and_decode(ref: Reference) -> None:
    runner, (a, b) = Runner(ref.ours()), ref.x
    first = runner.step([(0, a[:1], True), (5, b[:70], True), (3, a[:129], True)])
    assert gap(first, torch.cat((ref.out[0, :1], ref.out[1, :70], ref.out[0, :129]))) <= TOLERANCE
    for i in range(5):
        rows = (1 + i, 70 + i, 129 + i)
        got = runner.step(
            [(0, a[1 + i :][:1], False), (5, b[70 + i :][:1], False), (3, a[129 + i :][:1], False)]
        )
        expected = torch.stack([ref.out[s, row] for s, row in zip((0, 1, 0), rows, strict=True)])
        assert gap(got, expected) <= TOLERANCE


def test_two_ranks_make_the_halves_of_one(ref: Reference) -> None:
    whole = Runner(ref.ours()).mix([(0, ref.x[0], True)])
    halves = [Runner(ref.ours(TensorParallel(rank, 2))).mix([(0, ref.x[0], True)]) for rank in range(2)]
    assert [half.shape[1] for half in halves] == [64, 64]
    assert gap(torch.cat(halves, 1), whole) <= TOLERANCE


# The comparison must be able to fail.


@pytest.mark.parametrize("what", ["conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj_ba.weight"])
def test_notices_a_missing_ingredient(ref: Reference, what: str) -> None:
    layer = ref.ours()
    layer.get_parameter(what).data.zero_()
    assert gap(Runner(layer).step([(0, ref.x[0], True)]), ref.out[0]) > 100 * TOLERANCE


def test_notices_a_state_that_is_lost_between_chunks(ref: Reference) -> None:
    runner = Runner(ref.ours())
    runner.step([(2, ref.x[1, :64], True)])
    runner.matrices.zero_()
    assert gap(runner.step([(2, ref.x[1, 64:], False)]), ref.out[1, 64:]) > 100 * TOLERANCE
