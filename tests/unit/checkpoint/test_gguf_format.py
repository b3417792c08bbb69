"""GGUF weights: every block format against the gguf package, row order, names, experts."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QType

from fakes.tiny_gguf import gguf_tensors, permute, write_tiny_gguf
from hotrack.checkpoint import stored
from hotrack.checkpoint.gguf_blocks import DECODERS, decode_q4_1, decode_q8_0, decode_reference
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel
from hotrack.modelspec.gguf import TENSOR_TYPES

ONE_LAYER = {"num_hidden_layers": 1}


def checkpoint(path):
    return open_checkpoint(ResolvedModel("gguf", path, path.stem))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks per tensor, so that block borders are crossed."""
    monkeypatch.setattr(stored, "BLOCK_ELEMENTS", 5 * 128)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_names_and_values_are_those_of_the_hugging_face_layout(family, tmp_path):
    _, weights = write_tiny_gguf(tmp_path / "m.gguf", family, num_hidden_layers=2)
    with checkpoint(tmp_path / "m.gguf") as ckpt:
        assert set(ckpt.names()) == set(weights)
        for name, weight in weights.items():
            assert ckpt.info(name) == (tuple(weight.shape), "float32")
            assert torch.equal(ckpt.read(name, torch.float32), weight), name


@pytest.mark.parametrize(
    "qtype", [QType.F16, QType.BF16, QType.Q4_0, QType.Q4_1, QType.Q5_0, QType.Q5_1, QType.Q8_0]
)
def test_quantised_matrices(qtype, tmp_path):
    config, weights = write_tiny_gguf(tmp_path / "m.gguf", qtype=qtype, **ONE_LAYER)
    originals = gguf_tensors(config, weights)
    with checkpoint(tmp_path / "m.gguf") as ckpt:
        name = "model.layers.0.mlp.down_proj.weight"
        packed = gguf.quants.quantize(originals["blk.0.ffn_down.weight"], qtype)
        expected = torch.from_numpy(gguf.quants.dequantize(packed, qtype))
        assert torch.equal(ckpt.read(name, torch.float32), expected)
        assert torch.equal(ckpt.read(name, torch.bfloat16), expected.bfloat16())
        assert ckpt.info(name).dtype == {"F16": "float16", "BF16": "bfloat16"}.get(qtype.name, qtype.name)


def raw_gguf(path, qtype, rows, columns, seed=0):
    """One matrix of random blocks with finite scales; the package cannot quantise to K formats."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scales = {
        QType.Q4_K: (0, 2),
        QType.Q5_K: (0, 2),
        QType.Q6_K: (208,),
        QType.Q2_K: (80, 82),
        QType.Q3_K: (108,),
    }
    for at in scales.get(qtype, (0,)):
        raw[..., at : at + 2] = half(0.01)
    raw = raw.reshape(rows, -1)
    writer = gguf.GGUFWriter(path, "qwen3")
    for add in (writer.add_block_count, writer.add_head_count, writer.add_head_count_kv):
        add(1)
    writer.add_embedding_length(columns)
    writer.add_feed_forward_length(256)
    writer.add_context_length(64)
    writer.add_key_length(64)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return raw


@pytest.mark.parametrize(
    "qtype", [QType.Q4_K, QType.Q6_K, QType.Q5_K, QType.Q3_K, QType.Q2_K, QType.IQ4_NL, QType.IQ4_XS]
)
def test_block_formats_the_package_only_decodes(qtype, tmp_path):
    raw = raw_gguf(tmp_path / "m.gguf", qtype, rows=7, columns=512)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, qtype))
    assert expected.isfinite().all()
    with checkpoint(tmp_path / "m.gguf") as ckpt:
        assert torch.equal(ckpt.read("model.embed_tokens.weight", torch.float32), expected)
        part = torch.empty(3, 512)
        source = Source("model.embed_tokens.weight", select=(slice(3, 6),))
        load_weights(ckpt, {"p": LoadTarget(part, (source,))})
        assert torch.equal(part, expected[3:6])


def test_q4_1_and_q8_0_by_their_definition():
    """Independent of the package: value = scale * nibble + minimum, value = scale * int8."""
    block = np.zeros(20, dtype=np.uint8)
    block[:2] = half(0.5)
    block[2:4] = half(-1)
    block[4:] = np.arange(16) | (15 - np.arange(16)) << 4
    low = torch.arange(16) * 0.5 - 1
    assert torch.equal(decode_q4_1(torch.from_numpy(block), (1, 32))[0], torch.cat([low, low.flip(0)]))
    block = np.zeros(34, dtype=np.uint8)
    block[:2] = half(0.25)
    block[2:] = np.arange(-16, 16).astype(np.int8).view(np.uint8)
    assert torch.equal(decode_q8_0(torch.from_numpy(block), (1, 32))[0], torch.arange(-16, 16) * 0.25)


@pytest.mark.parametrize("name", DECODERS)
def test_fast_decoders_give_the_bits_of_the_package(name):
    """Random bytes, every scale: subnormal, infinite and NaN included."""
    qtype = QType[name]
    _, size = gguf.GGML_QUANT_SIZES[qtype]
    raw = np.random.default_rng(0).integers(0, 256, (64, 33 * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = decode_reference(qtype, torch.from_numpy(raw.reshape(-1)), (64, 33 * 32))
    result = DECODERS[name](torch.from_numpy(raw.reshape(-1)), (64, 33 * 32))
    assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))


def half(value: float) -> np.ndarray:
    return np.frombuffer(np.float16(value).tobytes(), dtype=np.uint8)


def test_our_sizes_are_the_package_s():
    for type_id, (name, block, size) in TENSOR_TYPES.items():
        assert (QType(type_id).name, gguf.GGML_QUANT_SIZES[QType(type_id)]) == (name, (block, size))


def test_row_order_rule():
    """Half-split rows x0 x1 | x2 x3 of a head are stored x0 x2 x1 x3."""
    assert permute(np.arange(8).reshape(8, 1), heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_parallel_shard_of_permuted_rows(tmp_path):
    _, weights = write_tiny_gguf(tmp_path / "m.gguf", **ONE_LAYER)
    name = "model.layers.0.self_attn.q_proj.weight"
    for rows in (slice(64, 128), slice(40, 101)):  # whole heads, and a cut through heads
        param = torch.empty(rows.stop - rows.start, 128)
        with checkpoint(tmp_path / "m.gguf") as ckpt:
            targets = {"q": LoadTarget(param, (Source(name, select=(rows,)),))}
            load_weights(ckpt, targets, is_elsewhere=lambda _: True)
        assert torch.equal(param, weights[name][rows])


def test_attention_bias_rows_are_permuted_too(tmp_path):
    _, weights = write_tiny_gguf(tmp_path / "m.gguf", attention_bias=True, **ONE_LAYER)
    with checkpoint(tmp_path / "m.gguf") as ckpt:
        assert ckpt.spec.attention_bias
        for part in "qkvo":
            name = f"model.layers.0.self_attn.{part}_proj.bias"
            assert torch.equal(ckpt.read(name, torch.float32), weights[name])


@pytest.mark.parametrize(
    "name", ["blk.0.ssm_in.weight", "blk.99999.attn_q.weight", "rope_factors_long.weight", "x"]
)
def test_unknown_tensor_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fakes.tiny_gguf.gguf_tensors", lambda c, w: gguf_tensors(c, w) | {name: np.ones((2, 32), "f4")}
    )
    write_tiny_gguf(tmp_path / "m.gguf", **ONE_LAYER)
    with pytest.raises(CheckpointError, match=name):
        checkpoint(tmp_path / "m.gguf")


def test_llama3_rope_factors_and_mixtral_are_refused(tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "m.gguf", extra={"llama.expert_count": 8}, **ONE_LAYER)
    with pytest.raises(CheckpointError, match="Mixtral"):
        checkpoint(tmp_path / "m.gguf")
    monkeypatch.setattr(
        "fakes.tiny_gguf.gguf_tensors",
        lambda c, w: gguf_tensors(c, w) | {"rope_freqs.weight": np.ones(16, "f4")},
    )
    write_tiny_gguf(tmp_path / "m.gguf", **ONE_LAYER)
    with pytest.raises(CheckpointError, match="rope factors"):
        checkpoint(tmp_path / "m.gguf")


def test_head_count_that_does_not_fit_the_rows(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", extra={"llama.attention.key_length": 24}, **ONE_LAYER)
    with pytest.raises(CheckpointError, match="head size 24"):
        checkpoint(tmp_path / "m.gguf")
