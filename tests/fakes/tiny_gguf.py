"""Small GGUF files written with the gguf package, laid out as llama.cpp's converter does."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

from fakes.tiny_checkpoints import CHAT_TEMPLATE, SPECIAL, tiny_config, tiny_weights

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
MERGES = ["h i", "1 2", "Ġ h"]
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp's converter: the halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(config: Mapping[str, object], weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Hugging Face tensors under their GGUF names, float32; experts stacked, llama's q and k permuted."""
    out: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, tensor in weights.items():
        value = tensor.float().numpy()
        stem, _, suffix = name.rpartition(".")
        if stem in TOP:
            out[f"{TOP[stem]}.{suffix}"] = value
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        if ".experts." in part:
            kind = part.rsplit(".", 1)[1].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(value)
            continue
        if config["model_type"] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = "num_attention_heads" if "q_proj" in part else "num_key_value_heads"
            value = permute(value, int(config[heads]))
        out[f"blk.{layer}.{NAMES[part]}.{suffix}"] = value
    return out | {name: np.stack(parts) for name, parts in experts.items()}


def byte_vocab() -> list[str]:
    """Special tokens, the 256 bytes, then what MERGES make."""
    merged = [m.replace(" ", "") for m in MERGES]
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]


def write_tiny_gguf(
    path: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    qtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    pre: str = "smollm",
    extra: Mapping[str, object] | None = None,
    **overrides: object,
) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Write ``path``; matrices in ``qtype``, vectors in F32. Returns the config and the exact weights.

    ``extra`` are string or integer metadata values that are added or replaced.
    """
    config = tiny_config(family, **overrides)
    weights = tiny_weights(config, seed)
    arch = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if family == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    vocab = byte_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocab) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (extra or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_string(key, value) if isinstance(value, str) else writer.add_uint32(key, value)
    for name, value in gguf_tensors(config, weights).items():
        kind = qtype if value.ndim > 1 and value.shape[-1] % 32 == 0 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, weights
