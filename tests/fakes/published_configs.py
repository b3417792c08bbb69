"""config.json of published models, the fields that their dimensions need."""

QWEN_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def deepseek_v4_flash(*, drafts: str = "mtp") -> dict[str, object]:
    """DeepSeek-V4-Flash; ``drafts``: 'mtp' (first release) or 'dspark' (0731)."""
    config: dict[str, object] = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
        "num_hidden_layers": 43, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
        "sliding_window": 128, "rms_norm_eps": 1e-6, "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
        "compress_rope_theta": 160000, "rope_theta": 10000, "max_position_embeddings": 1048576,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                         "beta_fast": 32, "beta_slow": 1},
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "num_hash_layers": 3, "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1, "expert_dtype": "fp4", "vocab_size": 129280,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    }  # fmt: skip
    if drafts == "dspark":
        config |= {
            "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0] * 3,
            "dspark_block_size": 5,
            "dspark_noise_token_id": 128799,
            "dspark_target_layer_ids": [40, 41, 42],
            "dspark_markov_rank": 256,
        }
    return config


def mimo_v2_flash(**quant: object) -> dict[str, object]:
    """MiMo-V2-Flash; ``quant`` adds to its quantization_config."""
    ignored = [f"model.layers.{i}.self_attn.o_proj" for i in range(48)]
    return {
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash",
        "num_hidden_layers": 48, "hidden_size": 4096, "vocab_size": 152576, "intermediate_size": 16384,
        "num_attention_heads": 64, "num_key_value_heads": 4, "swa_num_key_value_heads": 8,
        "head_dim": 192, "v_head_dim": 128, "rope_theta": 5e6, "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334, "sliding_window": 128,
        "hybrid_layer_pattern": [0 if i == 0 or (i + 1) % 6 == 0 else 1 for i in range(48)],
        "moe_layer_freq": [0] + [1] * 47, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": None,
        "layernorm_epsilon": 1e-5, "attention_value_scale": 0.707, "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "max_position_embeddings": 262144, "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
                                "ignored_layers": ignored, **quant},
    }  # fmt: skip


def qwen3_next(*, fp8: bool = False) -> dict[str, object]:
    """Qwen3-Next-80B-A3B."""
    config: dict[str, object] = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "intermediate_size": 5120,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25,
        "rope_theta": 1e7, "max_position_embeddings": 262144, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    return config | ({"quantization_config": QWEN_FP8} if fp8 else {})


def qwen3_30b_a3b(*, fp8: bool = False) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "intermediate_size": 6144,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rope_theta": 1e6,
        "max_position_embeddings": 40960, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    return config | ({"quantization_config": QWEN_FP8} if fp8 else {})


def smollm2_135m() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152, "intermediate_size": 1536,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 1e5,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
