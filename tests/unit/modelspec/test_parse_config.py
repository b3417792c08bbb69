"""config.json -> ModelSpec: spellings, defaults, known sizes, hostile values."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.tiny_checkpoints import tiny_config
from hotrack.core.errors import CheckpointError
from hotrack.modelspec import load_spec, parse_config
from hotrack.modelspec.bytes import (
    kv_bytes_per_token,
    num_active_parameters,
    num_parameters,
    state_bytes,
    weight_bytes,
)

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


MIMO_V2_FLASH = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": 152576,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_head_dim": 192,
    "swa_v_head_dim": 128,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "attention_chunk_size": 128,
    "hybrid_layer_pattern": [0 if i == 0 or (i + 1) % 6 == 0 else 1 for i in range(48)],
    "moe_layer_freq": [0] + [1] * 47,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": None,
    "layernorm_epsilon": 1e-5,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_bias": False,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def test_smollm2_sizes_are_the_published_ones():
    spec = parse_config(SMOLLM2)
    assert (spec.family, spec.head_dim, spec.rope.theta, spec.rope.dim) == ("llama", 64, 1e5, 64)
    assert num_parameters(spec) == num_active_parameters(spec) == 134_515_008
    assert weight_bytes(spec) == 269_030_016
    assert weight_bytes(spec, "float32") == 2 * weight_bytes(spec)
    assert kv_bytes_per_token(spec) == 23_040


def test_qwen3_30b_a3b_sizes_are_the_published_ones():
    spec = parse_config(QWEN3_30B_A3B)
    assert spec.qk_norm
    assert spec.moe is not None
    assert spec.moe.norm_topk_prob
    assert len(spec.moe.sparse_layers) == 48
    assert weight_bytes(spec) == 61_064_245_248
    assert kv_bytes_per_token(spec) == 98_304
    assert round((num_active_parameters(spec) + 151936 * 2048) / 1e8) == 34  # 3.35 B with both embeddings


def test_qwen3_next_80b_sizes_are_the_published_ones():
    spec = parse_config(QWEN3_NEXT_80B)
    assert spec.gated_delta is not None
    assert len(spec.gated_delta.layers) == 36
    assert not {3, 7, 47} & set(spec.gated_delta.layers)
    assert (spec.rope.dim, spec.output_gate, spec.zero_centred_norm) == (64, True, True)
    assert num_parameters(spec) == 79_674_391_296
    assert kv_bytes_per_token(spec) == 24_576
    assert state_bytes(spec) == 77_266_944


def test_mimo_v2_flash_sizes_are_the_published_ones():
    spec = parse_config(MIMO_V2_FLASH)
    window = spec.windowed
    assert window is not None
    assert set(range(48)) - set(window.layers) == {0, 5, 11, 17, 23, 29, 35, 41, 47}
    assert (window.window, window.num_kv_heads, window.rope.theta, window.sinks) == (129, 8, 1e4, True)
    assert (spec.rope.theta, spec.rope.dim, window.rope.dim, spec.rms_norm_eps) == (5e6, 64, 64, 1e-5)
    assert (spec.value_dim, spec.value_scale, spec.qk_norm, spec.fused_qkv) == (128, 0.707, False, 0)
    assert round(num_parameters(spec) / 1e9) == 309
    assert round(num_active_parameters(spec) / 1e9) == 15
    assert kv_bytes_per_token(spec) == 23_040
    assert state_bytes(spec) == 39 * 129 * 5120


def test_mimo_v2_in_both_spellings():
    published = parse_config(tiny_config("mimo_v2_flash"))
    theirs = tiny_config("mimo_v2_flash", layer_types=None, num_local_experts=None)
    types = ["full_attention" if i in (0, 5) else "sliding_attention" for i in range(7)]
    rope = {"rope_type": "default", "partial_rotary_factor": 0.334}
    theirs |= {
        "hybrid_layer_pattern": None,
        "layer_types": types,
        "sliding_window_size": None,
        "sliding_window": 20,
        "moe_layer_freq": None,
        "mlp_layer_types": ["dense"] + ["sparse"] * 6,
        "rope_theta": None,
        "swa_rope_theta": None,
        "rope_parameters": {
            "full_attention": {**rope, "rope_theta": 1e4},
            "sliding_attention": {**rope, "rope_theta": 500.0},
        },
    }
    assert parse_config(theirs) == published
    assert parse_config(tiny_config("mimo_v2")).fused_qkv == 4


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hybrid_layer_pattern", [0, 1], "a list with an entry for each of 7 layers"),
        ("swa_head_dim", 32, "swa_head_dim must be 24"),
        ("scoring_func", "softmax", "scoring_func 'softmax' is not supported"),
        ("n_shared_experts", 1, "n_shared_experts must be null"),
        ("n_group", 5, "n_group must be a divisor of 16"),
        ("swa_num_key_value_heads", 3, "not a multiple of num_key_value_heads 3"),
        ("attention_projection_layout", "other", "'split' or 'fused_qkv'"),
        ("layer_types", ["linear_attention"] * 7, "not supported for this family"),
    ],
)
def test_mimo_v2_refuses(field, value, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(tiny_config("mimo_v2_flash", **{field: value}))


def test_qwen3_next_layers_in_both_spellings():
    types = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    assert parse_config(tiny_config("qwen3_next", layer_types=types)).gated_delta.layers == (0, 2, 3)
    assert parse_config(tiny_config("qwen3_next", full_attention_interval=2)).gated_delta.layers == (0, 2)
    with pytest.raises(CheckpointError, match="layer_types must be a list of 4"):
        parse_config(tiny_config("qwen3_next", layer_types=types[1:]))
    with pytest.raises(CheckpointError, match="sliding-window"):
        parse_config(tiny_config("qwen3_next", layer_types=["sliding_attention"] * 4))
    with pytest.raises(CheckpointError, match="sliding-window"):
        parse_config(tiny_config("qwen3_moe", layer_types=types))


def test_qwen3_next_heads_must_divide():
    with pytest.raises(CheckpointError, match="linear_num_value_heads 6 is not a multiple"):
        parse_config(tiny_config("qwen3_next", linear_num_value_heads=6))
    with pytest.raises(CheckpointError, match="of which 0 are rotated"):
        parse_config(tiny_config("qwen3_next", partial_rotary_factor=0.0))
    with pytest.raises(CheckpointError, match="partial_rotary_factor must be 1"):
        parse_config(tiny_config("qwen3_moe", partial_rotary_factor=0.5))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "mimo_v2"])
def test_byte_arithmetic_agrees_with_a_written_checkpoint(family, tmp_path):
    from fakes.tiny_checkpoints import tiny_weights

    overrides = {} if family == "mimo_v2" else {"attention_bias": True, "mlp_bias": family == "llama"}
    if "moe" in family or "next" in family:
        overrides |= {"mlp_only_layers": [1]}
    config = tiny_config(family, **overrides)
    weights = tiny_weights(config, seed=0)
    assert num_parameters(parse_config(config)) == sum(w.numel() for w in weights.values())


def test_head_dim_defaults_differ_by_family():
    def head_dim(family: str) -> int:
        config = tiny_config(family)
        del config["head_dim"]
        return parse_config(config).head_dim

    assert (head_dim("llama"), head_dim("qwen3"), head_dim("qwen3_moe")) == (32, 128, 32)


def test_norm_topk_prob_is_off_unless_said():
    config = tiny_config("qwen3_moe")
    del config["norm_topk_prob"]
    assert parse_config(config).moe.norm_topk_prob is False


def test_both_spellings_of_the_expert_count():
    config = tiny_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    assert parse_config(config).moe.num_experts == 8


@pytest.mark.parametrize(
    ("step", "dense", "sparse"), [(1, [], (0, 1, 2, 3)), (2, [], (1, 3)), (1, [0, 2], (1, 3)), (2, [3], (1,))]
)
def test_sparse_layers(step, dense, sparse):
    config = tiny_config("qwen3_moe", decoder_sparse_step=step, mlp_only_layers=dense)
    assert parse_config(config).moe.sparse_layers == sparse


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
def test_older_and_newer_rope_spellings_agree(kind_key):
    older = tiny_config("llama", rope_theta=5e5, rope_scaling={kind_key: "llama3", **LLAMA3})
    newer = tiny_config("llama")
    del newer["rope_theta"], newer["rope_scaling"]
    newer["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    rope = parse_config(older).rope
    assert rope == parse_config(newer).rope
    assert (rope.kind, rope.theta, rope.factor) == ("llama3", 5e5, 8.0)
    assert rope.params["original_max_position_embeddings"] == 8192


def test_linear_rope():
    rope = parse_config(tiny_config("qwen3", rope_scaling={"rope_type": "linear", "factor": 2})).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_yarn_rope():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = parse_config(tiny_config("qwen3", rope_scaling=scaling)).rope
    assert (rope.kind, rope.factor) == ("yarn", 4.0)
    expected = {"original_max_position_embeddings": 32768, "beta_fast": 32, "beta_slow": 1, "truncate": 1}
    assert rope.params == expected
    with_factor = tiny_config("qwen3", rope_scaling=scaling | {"attention_factor": 1.5})
    assert parse_config(with_factor).rope.params["attention_factor"] == 1.5


def test_eos_may_be_a_list_and_generation_config_wins(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", eos_token_id=7)))
    assert load_spec(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert load_spec(tmp_path).eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM.*LlamaForCausalLM",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": None, "architectures": None}, "unsupported architecture"),
        ({"model_type": ["llama"]}, "model_type must be a string"),
        ({"model_type": "x" * 10_000, "architectures": None}, "unsupported architecture"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be an integer between 1 and"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"hidden_size": 4096.0}, "hidden_size"),
        ({"hidden_size": []}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"head_dim": 33}, "even"),
        ({"num_key_value_heads": 3}, "not a multiple of"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_parameters must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "longrope.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1}},
            "mscale is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of"),
        ({"dtype": 16}, "dtype must be a string"),
        ({"eos_token_id": [1, 512]}, "eos_token_id"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id"),
        ({"eos_token_id": [0] * 5000}, "eos_token_id"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
    ],
)
def test_hostile_config_is_a_clear_error(change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_config(tiny_config("llama") | change)
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": None},
        {"num_experts": 0},
        {"num_experts_per_tok": 9},
        {"moe_intermediate_size": -64},
        {"decoder_sparse_step": 0},
        {"mlp_only_layers": ["0"]},
        {"mlp_only_layers": [-1]},
        {"norm_topk_prob": 1},
    ],
)
def test_hostile_expert_fields(change):
    with pytest.raises(CheckpointError):
        parse_config(tiny_config("qwen3_moe") | change)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[1, 2]",
        b"\xff\xfe",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    ],
    ids=["empty", "text", "list", "binary", "null", "deep-list", "deep-object", "huge-int"],
)
def test_files_that_are_not_a_config(data, tmp_path):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(tmp_path)


def test_repeated_keys_are_ambiguous(tmp_path):
    text = json.dumps(tiny_config("llama"))
    (tmp_path / "config.json").write_text(text[:-1] + ', "vocab_size": 9}')
    with pytest.raises(CheckpointError, match="'vocab_size' appears twice"):
        load_spec(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        load_spec(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(sorted(tiny_config("qwen3_moe"))), value=JSON)
def test_any_value_of_any_field_parses_or_is_a_checkpoint_error(field, value):
    with contextlib.suppress(CheckpointError):
        parse_config(tiny_config("qwen3_moe") | {field: value})
