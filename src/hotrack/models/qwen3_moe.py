"""Qwen3-MoE (Yang et al., 2025)."""

from hotrack.models.names import EXPERTS
from hotrack.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 whose sparse layers route each token to ``top_k`` experts; no shared expert."""

    names = Qwen3ForCausalLM.names | EXPERTS
