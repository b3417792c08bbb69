"""Quantised checkpoints: dequantised while loading, kept, sharded, and refused when damaged."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.paged_runner import CPU, PagedRunner, SequenceState, allocate, load_model
from fakes.quantised_checkpoints import write_quantised
from fakes.thread_group import run_ranks
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.quantised import QuantisedTensor
from hotrack.checkpoint.stored import TensorFile
from hotrack.checkpoint.targets import LoadTarget, Scales, Source
from hotrack.core.errors import CheckpointError, ConfigError
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.hub.model import ResolvedModel
from hotrack.kernels.reference.quant import (
    decode_e8m0,
    dequantise_fp8,
    dequantise_mxfp4,
    quantise_fp8,
    quantise_mxfp4,
)
from hotrack.models.registry import build_model

IDS = torch.randint(0, 512, (50,), generator=torch.Generator().manual_seed(5))
UP = "model.layers.0.mlp.up_proj.weight"  # [256, 128] in blocks of 32x64
FORMATS = {
    "fp8": {},
    "bf16 scales": {"scale": "bfloat16"},
    "e8m0": {"scale": "e8m0"},
    "bytes": {"scale": "uint8"},
    "per tensor": {"block": None},
    "ragged": {"block": (48, 80)},
    "ignored": {"ignored": ("model.layers.0.self_attn.o_proj",)},
}


def checkpoint(folder):
    return open_checkpoint(ResolvedModel("folder", folder, folder.name))


def loaded(folder, tp=None, dtype=torch.float32):
    with checkpoint(folder) as ckpt:
        model = build_model(ckpt.spec, dtype=dtype, device=CPU, tp=tp or TensorParallel(), allocate=allocate)
        load_weights(ckpt, model.load_plan(), num_threads=1)
    model.after_load()
    return model


def logits(model):
    return PagedRunner(model).step([(SequenceState(), IDS)])


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mimo_v2"])
def test_a_quantised_model_computes_what_its_dequantised_weights_do(family, options, tmp_path):
    values = write_quantised(tmp_path, family, **options)
    model = loaded(tmp_path)
    assert torch.equal(logits(model), logits(load_model(model.spec, values)))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_experts_in_mxfp4(family, tmp_path):
    values = write_quantised(tmp_path, family, experts="mxfp4", scale="e8m0")
    model = loaded(tmp_path)
    assert model.spec.quant.experts == "mxfp4"
    assert torch.equal(logits(model), logits(load_model(model.spec, values)))


def test_two_ranks_take_parts_that_are_no_whole_blocks(tmp_path):
    """64 expert channels over two ranks are 32 each, half a block: dequantised, any part will do."""
    values = write_quantised(tmp_path, "qwen3_moe", block=(64, 64))
    whole = logits(load_model(loaded(tmp_path).spec, values))
    for found in run_ranks(2, lambda tp: logits(loaded(tmp_path, tp))):
        assert (found - whole).abs().max() <= 1e-4


def test_projections_quantised_in_the_publishers_shares(tmp_path):
    """Each of 4 shares of 40 rows starts a block of its own, so there are 8 lines of scales, not 5."""
    folder = tmp_path / "mimo"
    write_quantised(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    weight = torch.randn(160, 64, generator=torch.Generator().manual_seed(1))
    parts = [quantise_fp8(part, (32, 64)) for part in weight.chunk(4)]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    save_file(
        {name: torch.cat([p[0] for p in parts]), name + "_scale_inv": torch.cat([p[1] for p in parts])},
        folder / "model.safetensors",
    )
    expected = torch.cat([dequantise_fp8(*p, (32, 64)) for p in parts])
    mimo = {
        "model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"], "head_dim": 48, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_layer_freq": [0, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 1, 1],
        "attention_projection_layout": "fused_qkv", "sliding_window": 32, "num_attention_heads": 8,
        "num_key_value_heads": 4, "swa_num_key_value_heads": 4, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | mimo))
    with checkpoint(folder) as ckpt:
        assert torch.equal(ckpt.read(name, torch.float32), expected)


def test_row_blocks_and_columns_of_a_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("hotrack.checkpoint.stored.BLOCK_ELEMENTS", 300)  # two rows at a time
    values = write_quantised(tmp_path, "llama", num_hidden_layers=1)
    with checkpoint(tmp_path) as ckpt:
        assert ckpt.info(UP) == ((256, 128), "float8_e4m3fn")
        assert not [name for name in ckpt.names() if "scale" in name]
        part = torch.empty(90, 50)
        ckpt.stored(UP).copy_into(part, (slice(31, 121), slice(40, 90)))
    assert torch.equal(part, values[UP][31:121, 40:90])


def test_a_share_reads_only_its_rows(tmp_path, monkeypatch):
    """A shard never needs the whole tensor, in memory or from disk."""
    write_quantised(tmp_path, "llama", num_hidden_layers=1)
    reads = []
    original = TensorFile.read

    def read(self, offset, nbytes):
        reads.append(nbytes)
        return original(self, offset, nbytes)

    with checkpoint(tmp_path) as ckpt:
        monkeypatch.setattr(TensorFile, "read", read)
        target = LoadTarget(torch.empty(64, 128), (Source(UP, (), (slice(64, 128),)),))
        load_weights(ckpt, {"p": target}, num_threads=1, is_elsewhere=lambda _: True)
    assert sum(reads) == 64 * 128 + 2 * 2 * 4  # a quarter of the values, two lines of two scales


@pytest.mark.parametrize("experts", ["fp8", "mxfp4"])
def test_a_share_of_columns_never_makes_the_whole_tensor(experts, tmp_path, monkeypatch):
    """2 MiB of values come in runs of 256 Ki; only half of each run is kept."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 1024, "moe_intermediate_size": 2048, "num_experts": 2}
    values = write_quantised(tmp_path, "qwen3_moe", experts=experts, scale="e8m0", block=(64, 64), **sizes)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    reads, decoded = [], []
    original, dequantise = TensorFile.read, QuantisedTensor._read_rows

    def read(self, offset, nbytes):
        reads.append(nbytes)
        return original(self, offset, nbytes)

    def read_rows(self, start, stop):
        block = dequantise(self, start, stop)
        decoded.append(block.numel())
        return block

    with checkpoint(tmp_path) as ckpt:
        monkeypatch.setattr(TensorFile, "read", read)
        monkeypatch.setattr(QuantisedTensor, "_read_rows", read_rows)
        half = LoadTarget(torch.empty(1024, 1024), (Source(name, (), (slice(None), slice(1024, 2048))),))
        load_weights(ckpt, {"p": half}, num_threads=1, is_elsewhere=lambda _: True)
    assert torch.equal(half.param, values[name][:, 1024:])
    assert max(reads) <= max(decoded) == 1 << 18


def kept(rows, columns, block, *outer):
    weight = torch.empty(*outer, rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.full((*outer, -(-rows // block[0]), -(-columns // block[1])), float("nan"))
    return weight, Scales("p_scales", scales, block)


def test_kept_quantised_bit_by_bit(tmp_path):
    """The stored values and scales of a fused, sharded parameter, and the names of both as they land."""
    write_quantised(tmp_path, "llama", num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    gate = UP.replace("up_proj", "gate_proj")
    weight, scales = kept(256, 128, (32, 64))
    rows = slice(128, 256)
    sources = (Source(gate, (slice(0, 128),), (rows,)), Source(UP, (slice(128, 256),), (rows,)))
    filled = []
    with checkpoint(tmp_path) as ckpt:
        load_weights(
            ckpt,
            {"p": LoadTarget(weight, sources, scales)},
            is_elsewhere=lambda _: True,
            filled=filled.append,
        )
    assert filled == ["p", "p_scales"]
    both = [stored[name][rows].view(torch.uint8) for name in (gate, UP)]
    assert torch.equal(weight.view(torch.uint8), torch.cat(both))
    assert torch.equal(scales.param, torch.cat([stored[n + "_scale_inv"][4:8] for n in (gate, UP)]))


def test_kept_experts_and_columns(tmp_path):
    values = write_quantised(tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=128)
    weight, scales = kept(128, 64, (32, 64), 8)  # the second half of each expert's 128 columns
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(8)]
    sources = tuple(Source(n, (e,), (slice(None), slice(64, 128))) for e, n in enumerate(names))
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, sources, scales)}, is_elsewhere=lambda _: True)
    for e, name in enumerate(names):
        found = dequantise_fp8(weight[e], scales.param[e], (32, 64))
        assert torch.equal(found, values[name][:, 64:])


@pytest.mark.parametrize("block_elements", [1 << 18, 300])
@pytest.mark.parametrize("options", [{"block": None}, {"ignored": ("model.layers.0.mlp.up_proj",)}])
def test_quantised_on_the_fly(options, block_elements, tmp_path, monkeypatch):
    """Weights of another format become FP8 in blocks while they are read."""
    monkeypatch.setattr("hotrack.checkpoint.keep.BLOCK_ELEMENTS", block_elements)
    values = write_quantised(tmp_path, "llama", num_hidden_layers=1, **options)
    weight, scales = kept(192, 128, (64, 64))
    source = Source(UP, (), (slice(64, 256),))
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, (source,), scales)}, is_elsewhere=lambda _: True)
    expected, expected_scales = quantise_fp8(values[UP][64:], (64, 64))
    assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.param, expected_scales)


def packed(rows, columns, *outer):
    weight = torch.empty(*outer, rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*outer, rows, columns // 32, dtype=torch.uint8)
    return weight, Scales("p_scales", scales, (1, 32))


@pytest.mark.parametrize("scale", ["e8m0", "uint8"])
def test_experts_kept_in_mxfp4(scale, tmp_path):
    """Published bytes of the second half of the columns, and their E8M0 bytes."""
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 128}
    values = write_quantised(tmp_path, "qwen3_moe", experts="mxfp4", scale=scale, **sizes)
    stored = load_file(tmp_path / "model.safetensors")
    weight, scales = packed(128, 64, 8)
    names = [f"model.layers.0.mlp.experts.{e}.down_proj.weight" for e in range(8)]
    sources = tuple(Source(n, (e,), (slice(None), slice(64, 128))) for e, n in enumerate(names))
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, sources, scales)}, is_elsewhere=lambda _: True)
    for e, name in enumerate(names):
        assert torch.equal(weight[e], stored[name][:, 32:])
        found = dequantise_mxfp4(weight[e], decode_e8m0(scales.param[e]))
        assert torch.equal(found, values[name][:, 64:])


def test_fused_experts_and_signed_bytes_in_mxfp4(tmp_path):
    """gate and up of an expert in one parameter; the file calls its bytes I8."""
    write_quantised(tmp_path, "qwen3_moe", experts="mxfp4", scale="e8m0", num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.0.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up")]
    signed = {name: stored[name].view(torch.int8) for name in names}
    save_file(stored | signed, tmp_path / "model.safetensors")
    weight, scales = packed(128, 128, 2)
    sources = tuple(Source(n, (1, slice(64 * i, 64 * (i + 1)))) for i, n in enumerate(names))
    with checkpoint(tmp_path) as ckpt:
        assert torch.equal(ckpt.read(names[0], torch.float32)[0, :2], _first_pair(stored, names[0]))
        load_weights(ckpt, {"p": LoadTarget(weight, sources, scales)}, is_elsewhere=lambda _: True)
    assert torch.equal(weight[1], torch.cat([stored[name] for name in names]))


def _first_pair(stored, name):
    scales = decode_e8m0(stored[name.removesuffix(".weight") + ".scale"].view(torch.uint8))
    return dequantise_mxfp4(stored[name], scales)[0, :2]


def test_plain_weights_become_mxfp4(tmp_path):
    values = write_quantised(tmp_path, "llama", num_hidden_layers=1)
    weight, scales = packed(256, 128)
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, (Source(UP),), scales)}, is_elsewhere=lambda _: True)
    expected, expected_scales = quantise_mxfp4(values[UP])
    assert torch.equal(weight, expected)
    assert torch.equal(decode_e8m0(scales.param), expected_scales)


@pytest.mark.parametrize(("scale", "same"), [("e8m0", True), ("float32", False)])
def test_fp8_with_powers_of_two(scale, same, tmp_path):
    """Scales that are no powers of two do not fit a byte: those values are quantised anew."""
    values = write_quantised(tmp_path, "llama", num_hidden_layers=1, scale=scale)
    stored = load_file(tmp_path / "model.safetensors")
    weight = torch.empty(256, 128, dtype=torch.float8_e4m3fn)
    scales = Scales("p_scales", torch.empty(8, 2, dtype=torch.uint8), (32, 64))
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, (Source(UP),), scales)}, is_elsewhere=lambda _: True)
    assert torch.equal(weight.view(torch.uint8), stored[UP].view(torch.uint8)) is same
    found = dequantise_fp8(weight, decode_e8m0(scales.param), (32, 64))
    if same:
        assert torch.equal(found, values[UP])
    else:
        assert ((found - values[UP]).abs() <= values[UP].abs() / 16 + 1e-4).all()


def test_half_a_group_cannot_stay_in_mxfp4(tmp_path):
    write_quantised(tmp_path, "qwen3_moe", experts="mxfp4", scale="e8m0", num_hidden_layers=1)
    weight, scales = packed(128, 32)
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    target = LoadTarget(weight, (Source(name, (), (slice(None), slice(16, 48))),), scales)
    with checkpoint(tmp_path) as ckpt, pytest.raises(ConfigError, match="columns 16 to 48 of 64"):
        load_weights(ckpt, {"p": target}, is_elsewhere=lambda _: True)


@pytest.mark.parametrize(
    ("source", "shape", "named"),
    [
        (Source(UP, (), (slice(48, 96),)), (48, 128), "rows 48 to 96 of 256"),
        (Source(UP, (), (slice(64, 100),)), (36, 128), "rows 64 to 100 of 256"),
        (Source(UP, (), (slice(None), slice(32, 128))), (256, 96), "columns 32 to 128 of 128"),
        (Source(UP, (slice(16, 272),)), (272, 128), "rows 16 to 272 of 272"),
    ],
)
def test_parts_that_are_no_whole_blocks_cannot_stay_quantised(source, shape, named, tmp_path):
    write_quantised(tmp_path, "llama", num_hidden_layers=1)
    weight, scales = kept(*shape, (32, 64))
    with checkpoint(tmp_path) as ckpt, pytest.raises(ConfigError) as error:
        load_weights(ckpt, {"p": LoadTarget(weight, (source,), scales)}, is_elsewhere=lambda _: True)
    assert named in error.value.message
    assert UP in error.value.message
    assert "--tensor-parallel-size" in error.value.message


def test_the_last_block_may_be_short(tmp_path):
    values = write_quantised(tmp_path, "llama", num_hidden_layers=1, block=(48, 80))
    weight, scales = kept(256, 128, (48, 80))
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"p": LoadTarget(weight, (Source(UP),), scales)}, is_elsewhere=lambda _: True)
    assert torch.equal(dequantise_fp8(weight, scales.param, (48, 80)), values[UP])


def damaged(folder, change, **options):
    """A checkpoint whose stored tensors ``change`` altered; UP names what it should be about."""
    write_quantised(folder, "llama", num_hidden_layers=1, **options)
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


SCALE = UP + "_scale_inv"
DAMAGES = {
    "no scales": (lambda s: s.pop(SCALE), "its scales are missing", {}),
    "no weight": (lambda s: s.pop(UP), "there is no such tensor", {}),
    "plain weight": (lambda s: s.update({UP: s[UP].float()}), "one of float32", {}),
    "few scales": (lambda s: s.update({SCALE: s[SCALE][1:].clone()}), "scales of shape [7, 2]", {}),
    "transposed": (lambda s: s.update({SCALE: s[SCALE].T.contiguous()}), "blocks of 32x64 need [8, 2]", {}),
    "scalar": (lambda s: s.update({SCALE: torch.ones(())}), "scales of shape []", {}),
    "integers": (lambda s: s.update({SCALE: s[SCALE].int()}), "scales of dtype int32", {}),
    "three dimensions": (lambda s: s.update({UP: s[UP][None]}), "has shape [1, 256, 128]", {}),
}


@pytest.mark.parametrize(("change", "message", "options"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_companions_are_named_before_anything_is_loaded(change, message, options, tmp_path):
    damaged(tmp_path, change, **options)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as error:
        checkpoint(tmp_path)
    assert message in error.value.message
    assert UP in error.value.message
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_no_numbers(bad, tmp_path):
    def spoil(stored):
        stored[SCALE][5, 1] = bad

    damaged(tmp_path, spoil)
    with checkpoint(tmp_path) as ckpt:
        target = LoadTarget(torch.empty(256, 128), (Source(UP),))
        with pytest.raises(CheckpointError) as error:
            load_weights(ckpt, {"p": target}, is_elsewhere=lambda _: True)
    assert repr(UP) in error.value.message
    assert str(bad) in error.value.message


def test_the_e8m0_byte_that_is_no_number(tmp_path):
    def spoil(stored):
        stored[UP.removesuffix(".weight") + ".scale"].view(torch.uint8)[0, 0] = 255

    damaged(tmp_path, spoil, scale="e8m0")
    with checkpoint(tmp_path) as ckpt, pytest.raises(CheckpointError, match="hold nan"):
        ckpt.read(UP, torch.float32)


def test_mxfp4_scales_of_a_wrong_shape(tmp_path):
    write_quantised(tmp_path, "qwen3_moe", experts="mxfp4", scale="e8m0", num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj"
    stored[name + ".scale"] = stored[name + ".scale"][:, 1:].clone()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj.*groups of 32 need \[64, 4\]"):
        checkpoint(tmp_path)


def test_quantised_values_without_a_quantization_config(tmp_path):
    write_quantised(tmp_path, "llama", num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with checkpoint(tmp_path) as ckpt, pytest.raises(CheckpointError, match="stored as float8_e4m3fn"):
        load_weights(ckpt, {"p": LoadTarget(torch.empty(256, 128), (Source(UP),))})
