"""Qwen3-Next (Qwen team, 2025), Qwen3-Coder-Next included."""

from hotrack.models.qwen3_moe import Qwen3MoeForCausalLM


class Qwen3NextForCausalLM(Qwen3MoeForCausalLM):
    """Three layers of gated DeltaNet, then one of attention with a gated output and a partly rotated head, in
    turns; sparse layers with a shared expert; norms stored around 0."""

    names = Qwen3MoeForCausalLM.names | {
        "layers.*.linear_attn.in_proj_qkvz": "model.layers.*.linear_attn.in_proj_qkvz",
        "layers.*.linear_attn.in_proj_ba": "model.layers.*.linear_attn.in_proj_ba",
        "layers.*.linear_attn.conv1d": "model.layers.*.linear_attn.conv1d",
        "layers.*.linear_attn.A_log": "model.layers.*.linear_attn.A_log",
        "layers.*.linear_attn.dt_bias": "model.layers.*.linear_attn.dt_bias",
        "layers.*.linear_attn.norm": "model.layers.*.linear_attn.norm",
        "layers.*.linear_attn.out_proj": "model.layers.*.linear_attn.out_proj",
        "layers.*.mlp.shared_expert.gate_up_proj[gate]": "model.layers.*.mlp.shared_expert.gate_proj",
        "layers.*.mlp.shared_expert.gate_up_proj[up]": "model.layers.*.mlp.shared_expert.up_proj",
        "layers.*.mlp.shared_expert.down_proj": "model.layers.*.mlp.shared_expert.down_proj",
        "layers.*.mlp.shared_expert.gate": "model.layers.*.mlp.shared_expert_gate",
    }
