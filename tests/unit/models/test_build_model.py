"""Declaring, placing, loading and packing a model's parameters."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fakes.paged_runner import CPU, PagedRunner, SequenceState, allocate, load_model
from fakes.thread_group import run_ranks
from fakes.tiny_checkpoints import tiny_config, tiny_weights
from hotrack.core.errors import CheckpointError, ConfigError
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kvcache.spec import CacheSpec, Paged, State
from hotrack.models import MODELS, build_model
from hotrack.modelspec import ModelSpec, MoeSpec, RopeSpec, parse_config

LLAMA = ModelSpec(
    family="llama", source="llama", vocab_size=101, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, intermediate_size=96, rms_norm_eps=1e-5, max_position_embeddings=512, rope=RopeSpec(1e4, 16),
    tie_word_embeddings=True, attention_bias=True,
)  # fmt: skip
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True, attention_bias=False, tie_word_embeddings=False)
MOE = replace(QWEN3, family="qwen3_moe", moe=MoeSpec(4, 2, 32, True, (1,)))
NEXT_CONFIG = tiny_config("qwen3_next", vocab_size=101)
NEXT = parse_config(NEXT_CONFIG)
MIMO_CONFIG = tiny_config("mimo_v2", vocab_size=101)
MIMO = parse_config(MIMO_CONFIG)
SPECS = pytest.mark.parametrize("spec", [LLAMA, QWEN3, MOE, NEXT, MIMO], ids=lambda s: s.family)
IDS = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(5))


def random_weights(spec: ModelSpec) -> dict[str, Tensor]:
    """A checkpoint for ``spec``, by its own names."""
    if spec in (NEXT, MIMO):  # several runs of one tensor fill a parameter
        return tiny_weights(NEXT_CONFIG if spec is NEXT else MIMO_CONFIG, seed=0)
    model = build_model(spec, dtype=torch.float32, device=CPU, tp=TensorParallel(), allocate=allocate)
    generator, weights = torch.Generator().manual_seed(0), {}
    for target in model.load_plan().values():
        for source in target.sources:
            shape = target.param[source.dest].shape
            weights[source.name] = 0.2 * torch.randn(shape, generator=generator) + ("norm" in source.name)
    return weights


def prefill(model) -> Tensor:
    return PagedRunner(model).step([(SequenceState(), IDS)])


@SPECS
def test_two_ranks_compute_what_one_does(spec: ModelSpec) -> None:
    weights = random_weights(spec)
    whole = prefill(load_model(spec, weights))
    for logits in run_ranks(2, lambda tp: prefill(load_model(spec, weights, tp=tp))):
        assert logits.shape == (40, 101)
        assert (logits - whole).abs().max() <= 1e-4


def test_fused_projections_are_the_split_ones() -> None:
    """Dealt out to four ranks by the publisher, gathered by one, two or four of ours."""
    weights = tiny_weights(MIMO_CONFIG, seed=0)
    split = {}
    for name, tensor in weights.items():
        if not name.endswith("qkv_proj.weight"):
            split[name] = tensor
            continue
        kv = 4 if int(name.split(".")[2]) in (0, 5) else 8
        parts = [part.split((2 * 24, kv // 4 * 24, kv // 4 * 16)) for part in tensor.chunk(4)]
        for which, pieces in zip("qkv", zip(*parts, strict=True), strict=True):
            split[name.replace("qkv_proj", f"{which}_proj")] = torch.cat(pieces)
    whole = prefill(load_model(replace(MIMO, fused_qkv=0), split))
    assert torch.equal(prefill(load_model(MIMO, weights)), whole)
    for logits in run_ranks(4, lambda tp: prefill(load_model(MIMO, weights, tp=tp))):
        assert (logits - whole).abs().max() <= 1e-4


def test_two_ranks_split_gated_deltanet_by_key_head() -> None:
    """What a rank keeps of each sequence is half, and its chunks give what one rank computes at once."""
    weights = random_weights(NEXT)
    whole = load_model(NEXT, weights)
    expected = prefill(whole)

    def chunks(tp: TensorParallel) -> tuple[CacheSpec, Tensor]:
        model = load_model(NEXT, weights, tp=tp)
        runner, seq = PagedRunner(model), SequenceState()
        return model.cache_specs()[0], torch.cat([runner.step([(seq, part)]) for part in IDS.split(7)])

    for spec, logits in run_ranks(2, chunks):
        assert isinstance(spec, State)
        assert [t.shape for t in spec.tensors] == [(3, 128), (4, 16, 16)]
        assert (logits - expected).abs().max() <= 2e-4
    odd = replace(NEXT, gated_delta=replace(NEXT.gated_delta, num_key_heads=3, num_value_heads=6))
    with pytest.raises(ConfigError, match="cannot split 3 linear-attention key heads"):
        load_model(odd, weights, tp=TensorParallel(0, 2))


def test_norms_stored_around_0_are_loaded_as_they_are_used() -> None:
    weights = random_weights(NEXT)
    model = load_model(NEXT, weights, torch.bfloat16)
    norm = model.get_parameter("layers.0.input_layernorm.weight")
    assert norm.dtype == torch.float32
    assert torch.equal(norm, weights["model.layers.0.input_layernorm.weight"] + 1)
    gated = model.get_parameter("layers.0.linear_attn.norm.weight")
    assert torch.equal(gated, weights["model.layers.0.linear_attn.norm.weight"].bfloat16())


def test_bfloat16_stays_near_float32() -> None:
    weights = random_weights(NEXT)
    exact = prefill(load_model(NEXT, weights))
    runner, seq = PagedRunner(load_model(NEXT, weights, torch.bfloat16)), SequenceState()
    rounded = torch.cat([runner.step([(seq, part)]) for part in IDS.split(11)])
    assert rounded.isfinite().all()
    assert (rounded - exact).std() <= 0.2 * exact.std()  # a token near the edge goes to another expert


def test_parameters_are_declared_in_execution_order_and_tied_ones_once() -> None:
    model = build_model(LLAMA, dtype=torch.bfloat16, device=CPU, tp=TensorParallel(), allocate=allocate)
    names = [spec.name for spec in model.tensor_specs()]
    assert names[0] == "embed_tokens.weight"
    assert names[1:5] == [
        f"layers.0.{part}"
        for part in (
            "input_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias",
            "self_attn.o_proj.weight",
        )
    ]  # fmt: skip
    assert names[-1] == "norm.weight"
    assert {spec.dtype for spec in model.tensor_specs()} == {"bfloat16"}
    assert model.lm_head.weight is model.embed_tokens.weight


@SPECS
def test_every_parameter_is_a_view_into_what_was_allocated(spec: ModelSpec) -> None:
    placed: dict[str, Tensor] = {}

    def remember(specs):
        placed.update(allocate(specs))
        return placed

    model = build_model(spec, dtype=torch.float32, device=CPU, tp=TensorParallel(), allocate=remember)
    plan = model.load_plan()
    assert plan.keys() == placed.keys()
    for name, target in plan.items():
        assert target.param.data_ptr() == placed[name].data_ptr()


@SPECS
def test_the_load_plan_covers_every_element(spec: ModelSpec) -> None:
    model = build_model(spec, dtype=torch.float32, device=CPU, tp=TensorParallel(), allocate=allocate)
    for target in model.load_plan().values():
        target.param.fill_(torch.nan)
        for source in target.sources:
            target.param[source.dest] = 0.0
        assert not target.param.isnan().any()


def test_checkpoint_names() -> None:
    names = random_weights(MOE).keys()
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" in names
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "lm_head.weight" in names
    assert "lm_head.weight" not in random_weights(LLAMA)


def test_cache_specs_count_local_heads() -> None:
    tp = TensorParallel(1, 2)
    model = build_model(LLAMA, dtype=torch.bfloat16, device=CPU, tp=tp, allocate=allocate)
    assert model.cache_specs() == [Paged(1, 16, 16, 2)] * 2


def test_packed_copies_live_from_load_to_sleep_and_come_back() -> None:
    weights = random_weights(QWEN3)
    model = load_model(QWEN3, weights, torch.bfloat16)
    packed, logits = model.prepacked_bytes(), prefill(model)
    redundant = model.redundant_after_prepack()
    if not redundant:
        pytest.skip("this CPU has no oneDNN bf16 path")
    assert "layers.0.self_attn.qkv_proj.weight" in redundant
    assert "lm_head.weight" in redundant
    assert "embed_tokens.weight" not in redundant
    model.before_sleep()
    assert model.prepacked_bytes() == 0
    assert model.redundant_after_prepack() == []
    model.after_load()
    assert model.prepacked_bytes() == packed
    assert torch.equal(prefill(model), logits)


def test_a_tied_embedding_is_never_redundant() -> None:
    model = load_model(LLAMA, random_weights(LLAMA), torch.bfloat16)
    assert "embed_tokens.weight" not in model.redundant_after_prepack()


def test_expert_counts() -> None:
    model = load_model(MOE, random_weights(MOE))
    prefill(model)
    assert model.expert_counts() == {}
    model.record_expert_counts(True)
    prefill(model)
    prefill(model)
    assert model.expert_counts().keys() == {1}
    assert model.expert_counts()[1].sum() == 2 * 40 * MOE.moe.top_k
    model.record_expert_counts(False)
    assert model.expert_counts() == {}


def test_what_is_not_supported_is_named() -> None:
    def build(spec: ModelSpec, tp: TensorParallel) -> None:
        build_model(spec, dtype=torch.float32, device=CPU, tp=tp, allocate=allocate)

    with pytest.raises(CheckpointError, match=f"'rwkv'.*{', '.join(sorted(MODELS))}"):
        build(replace(LLAMA, family="rwkv", source="rwkv"), TensorParallel())
    with pytest.raises(CheckpointError, match="'gelu'"):
        build(replace(LLAMA, hidden_act="gelu"), TensorParallel())
    with pytest.raises(ConfigError, match="cannot split 4 attention heads"):
        build(LLAMA, TensorParallel(0, 3))
