"""Qwen3-MoE (Yang et al., 2025)."""

from hotrack.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 whose sparse layers route each token to ``top_k`` experts; no shared expert."""

    names = Qwen3ForCausalLM.names | {
        "layers.*.mlp.gate": "model.layers.*.mlp.gate",
        "layers.*.mlp.experts.gate_up_proj[*.gate]": "model.layers.*.mlp.experts.*.gate_proj.weight",
        "layers.*.mlp.experts.gate_up_proj[*.up]": "model.layers.*.mlp.experts.*.up_proj.weight",
        "layers.*.mlp.experts.down_proj[*]": "model.layers.*.mlp.experts.*.down_proj.weight",
    }
