"""A decoder layer as Llama, Qwen3 and Qwen3-MoE share it."""

from torch import Tensor

from hotrack.layers.attention import Attention
from hotrack.layers.base import Build, Layer
from hotrack.layers.mlp import GatedMLP
from hotrack.layers.norm import RMSNorm
from hotrack.layers.step import Step
from hotrack.modelspec.spec import ModelSpec
from hotrack.moe.block import SparseMoE


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward, each joined to the residual stream."""

    def __init__(self, index: int, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, build)
        self.self_attn = Attention(index, spec, build)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, build)
        self.mlp: GatedMLP | SparseMoE
        if spec.moe is not None and index in spec.moe.sparse_layers:
            self.mlp = SparseMoE(spec.hidden_size, spec.moe, build)
        else:
            self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, build)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """[T, D] -> [T, D]"""
        hidden = self.self_attn(self.input_layernorm(hidden), hidden, step)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)
