"""MiMo-V2-Flash and MiMo-V2.5, text (Xiaomi LLM-Core, 2025)."""

from hotrack.models.causal_lm import CausalLM
from hotrack.models.names import DECODER, EXPERTS


class MiMoV2ForCausalLM(CausalLM):
    """Values narrower than keys and scaled, a partly rotated head; most layers have a window, more K/V heads,
    another rotary base and a sink per head; experts are chosen by sigmoid scores with a correction bias.

    The projections are published as three tensors or, newer, as one that is dealt out to four ranks.
    """

    names = (
        DECODER
        | EXPERTS
        | {
            "layers.*.self_attn.qkv_proj[qkv]": "model.layers.*.self_attn.qkv_proj",
            "layers.*.self_attn.attention_sink_bias": "model.layers.*.self_attn.attention_sink_bias",
            "layers.*.mlp.gate.e_score_correction_bias": "model.layers.*.mlp.gate.e_score_correction_bias",
        }
    )
