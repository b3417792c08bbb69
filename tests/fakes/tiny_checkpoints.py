"""Tiny random checkpoints in Hugging Face layout, written without transformers.

``write_tiny(folder, "qwen3_moe", seed=0)`` gives a folder that transformers, hotrack and others load:
config.json, safetensors (one file, or shards with an index), a byte-level tokenizer with a chat template,
generation_config.json. Values are scaled so that logits have a standard deviation of about 1 (parity on
nearly constant logits proves nothing) and norms differ from 1 (so a forgotten norm weight shows).
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
}
FUSED = 4  # parts that MiMo-V2 deals its fused projections out to


def tiny_config(family: str, **overrides: object) -> dict[str, object]:
    """config.json of a tiny ``family``: 4 query and 2 key/value heads, so tensor parallel 1 and 2 work."""
    config: dict[str, object] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": family == "llama",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    if family == "llama":
        config["mlp_bias"] = False
    if family == "qwen3_moe":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if family == "qwen3_next":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "partial_rotary_factor": 0.25,
            "full_attention_interval": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        }
    if family.startswith("mimo_v2"):
        config |= {
            "num_hidden_layers": 7,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "swa_num_key_value_heads": 8,
            "head_dim": 24,
            "v_head_dim": 16,
            "swa_rope_theta": 500.0,
            "partial_rotary_factor": 0.334,
            "sliding_window_size": 19,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": None,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_value_scale": 0.707,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_projection_layout": "fused_qkv" if family == "mimo_v2" else None,
        }
    return config | overrides


def tiny_weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Every tensor of ``config`` under its Hugging Face name, in config["dtype"]."""
    c = _Numbers(config)
    generator = torch.Generator().manual_seed(seed)
    dtype: torch.dtype = getattr(torch, str(config["dtype"]))

    def matrix(rows: int, columns: int, std: float | None = None) -> torch.Tensor:
        scale = columns**-0.5 if std is None else std
        return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)

    def vector(size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.1).to(dtype)

    centre = 0 if config["model_type"] == "qwen3_next" else 1  # stored as the difference from 1

    def norm(size: int, centre: int = centre) -> torch.Tensor:
        return (centre + 0.2 * (2 * torch.rand(size, generator=generator) - 1)).to(dtype)

    hidden = c["hidden_size"]
    # Tied embeddings are also the head: rows of norm 1 give logits of standard deviation 1.
    tied = bool(config["tie_word_embeddings"])
    out = {"model.embed_tokens.weight": matrix(c["vocab_size"], hidden, hidden**-0.5 if tied else 1.0)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out[p + "input_layernorm.weight"] = norm(hidden)
        if config["model_type"] == "qwen3_next" and (i + 1) % c["full_attention_interval"]:
            out |= _gated_delta(config, p + "linear_attn.", matrix, vector, norm)
        elif "v_head_dim" in config:
            out |= _mimo_attention(config, i, p + "self_attn.", matrix, vector)
        else:
            out |= _attention(config, p + "self_attn.", matrix, vector, norm)
        out[p + "post_attention_layernorm.weight"] = norm(hidden)
        out |= _mlp(config, p + "mlp.", i, matrix, vector)
    out["model.norm.weight"] = norm(hidden)
    if not tied:
        out["lm_head.weight"] = matrix(c["vocab_size"], hidden)
    return out


class _Numbers:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, key: str) -> int:
        return int(self.config[key])


def _attention(config, prefix, matrix, vector, norm):
    c = _Numbers(config)
    hidden, dim = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    made = 2 * q if config["model_type"] == "qwen3_next" else q  # per head: the query, then the output's gate
    out = {}
    for name, rows, columns in (("q", made, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)):
        # Twice the usual scale on q and k: attention that is not nearly uniform, so mask and rope matter.
        std = 2 * columns**-0.5 if name in "qk" else None
        out[f"{prefix}{name}_proj.weight"] = matrix(rows, columns, std)
        if config["attention_bias"]:
            out[f"{prefix}{name}_proj.bias"] = vector(rows)
    if config["model_type"] != "llama":
        out |= {f"{prefix}q_norm.weight": norm(dim), f"{prefix}k_norm.weight": norm(dim)}
    return out


def _mimo_attention(config, layer, prefix, matrix, vector):
    c = _Numbers(config)
    hidden, dim, v_dim, heads = (
        c[k] for k in ("hidden_size", "head_dim", "v_head_dim", "num_attention_heads")
    )
    windowed = config["hybrid_layer_pattern"][layer]
    kv = c["swa_num_key_value_heads"] if windowed else c["num_key_value_heads"]
    rows = {"q": heads * dim, "k": kv * dim, "v": kv * v_dim}
    parts = {n: matrix(r, hidden, 2 * hidden**-0.5 if n in "qk" else None) for n, r in rows.items()}
    out = {f"{prefix}o_proj.weight": matrix(hidden, heads * v_dim)}
    if config["attention_projection_layout"]:
        dealt = zip(*(part.chunk(FUSED) for part in parts.values()), strict=True)
        out[f"{prefix}qkv_proj.weight"] = torch.cat([torch.cat(part) for part in dealt])
    else:
        out |= {f"{prefix}{name}_proj.weight": part for name, part in parts.items()}
    if windowed:
        out[f"{prefix}attention_sink_bias"] = 10 * vector(heads)
    return out


def _gated_delta(config, prefix, matrix, vector, norm):
    c = _Numbers(config)
    hidden, value_heads = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = value_heads * c["linear_value_head_dim"]
    return {
        prefix + "in_proj_qkvz.weight": matrix(2 * keys + 2 * values, hidden),
        prefix + "in_proj_ba.weight": matrix(2 * value_heads, hidden),
        prefix + "conv1d.weight": matrix(2 * keys + values, c["linear_conv_kernel_dim"])[:, None],
        prefix + "A_log": 10 * vector(value_heads),
        prefix + "dt_bias": 10 * vector(value_heads),
        prefix + "norm.weight": norm(c["linear_value_head_dim"], 1),
        prefix + "out_proj.weight": matrix(hidden, values),
    }


def _mlp(config, prefix, layer, matrix, vector):
    c = _Numbers(config)
    hidden = c["hidden_size"]
    if config["model_type"].startswith("mimo"):
        if not config["moe_layer_freq"][layer]:
            return _gated(prefix, hidden, c["intermediate_size"], matrix, None)
        out = {f"{prefix}gate.weight": matrix(c["n_routed_experts"], hidden)}
        out[f"{prefix}gate.e_score_correction_bias"] = vector(c["n_routed_experts"])
        for e in range(c["n_routed_experts"]):
            out |= _gated(f"{prefix}experts.{e}.", hidden, c["moe_intermediate_size"], matrix, None)
        return out
    sparse = (
        config["model_type"] in ("qwen3_moe", "qwen3_next")
        and layer not in config["mlp_only_layers"]
        and (layer + 1) % c["decoder_sparse_step"] == 0
    )
    if not sparse:
        return _gated(
            prefix, hidden, c["intermediate_size"], matrix, vector if config.get("mlp_bias") else None
        )
    out = {f"{prefix}gate.weight": matrix(c["num_experts"], hidden)}
    for e in range(c["num_experts"]):
        out |= _gated(f"{prefix}experts.{e}.", hidden, c["moe_intermediate_size"], matrix, None)
    if config["model_type"] == "qwen3_next":
        out |= _gated(prefix + "shared_expert.", hidden, c["shared_expert_intermediate_size"], matrix, None)
        out[prefix + "shared_expert_gate.weight"] = matrix(1, hidden)
    return out


def _gated(prefix, hidden, inner, matrix, bias):
    out = {}
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        out[f"{prefix}{name}_proj.weight"] = matrix(rows, columns)
        if bias:
            out[f"{prefix}{name}_proj.bias"] = bias(rows)
    return out


def byte_tokenizer() -> Tokenizer:
    """Ids 0-2 special, 3-258 the bytes; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)


def write_tiny(folder: Path, family: str, seed: int = 0, *, shards: int = 1, **overrides: object) -> Path:
    """Write a tiny checkpoint into ``folder`` and return it; ``overrides`` replace config.json fields."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    weights = tiny_weights(config, seed)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(folder, weights, shards)
    _write_json(folder / "config.json", config)
    eos = [config["eos_token_id"], 0]
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "temperature": 0.7, "top_p": 0.9})
    write_tokenizer(folder)
    return folder


def _write_shards(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    names = list(weights)
    index: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: weights[n] for n in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(w.numel() * w.element_size() for w in weights.values())
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2))
