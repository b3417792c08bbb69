"""Qwen3, dense (Yang et al., 2025)."""

from hotrack.models.causal_lm import CausalLM
from hotrack.models.names import DECODER


class Qwen3ForCausalLM(CausalLM):
    """Llama's shape with an RMSNorm over each head of q and k before the rotary embedding."""

    names = DECODER | {
        "layers.*.self_attn.q_norm": "model.layers.*.self_attn.q_norm",
        "layers.*.self_attn.k_norm": "model.layers.*.self_attn.k_norm",
    }
