"""Llama (Touvron et al., 2023; Grattafiori et al., 2024) and models of the same shape, such as SmolLM2."""

from hotrack.models.causal_lm import CausalLM
from hotrack.models.names import DECODER


class LlamaForCausalLM(CausalLM):
    """Grouped-query attention, SwiGLU, RMSNorm; optional biases and tied embeddings."""

    names = DECODER
