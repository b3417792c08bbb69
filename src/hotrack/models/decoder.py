"""A decoder layer as all families share it."""

from torch import Tensor

from hotrack.layers.attention import Attention
from hotrack.layers.base import Build, Layer
from hotrack.layers.gated_delta import GatedDeltaNet
from hotrack.layers.mlp import GatedMLP
from hotrack.layers.norm import RMSNorm
from hotrack.layers.step import Step
from hotrack.modelspec.spec import ModelSpec
from hotrack.moe.block import SparseMoE


class DecoderLayer(Layer):
    """A pre-norm mixer (attention or gated DeltaNet) and feed-forward, each joined to the residual stream."""

    def __init__(self, index: int, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        size, eps, zero_centred = spec.hidden_size, spec.rms_norm_eps, spec.zero_centred_norm
        self.input_layernorm = RMSNorm(size, eps, build, zero_centred=zero_centred)
        # Asked in every step; looking for a module that is not there takes microseconds.
        self.is_recurrent = spec.gated_delta is not None and index in spec.gated_delta.layers
        if spec.gated_delta is not None and self.is_recurrent:
            self.linear_attn = GatedDeltaNet(index, spec, spec.gated_delta, build)
        else:
            self.self_attn = Attention(index, spec, build)
        self.post_attention_layernorm = RMSNorm(size, eps, build, zero_centred=zero_centred)
        self.mlp: GatedMLP | SparseMoE
        if spec.moe is not None and index in spec.moe.sparse_layers:
            self.mlp = SparseMoE(spec.hidden_size, spec.moe, build)
        else:
            self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.mlp_bias, build)

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        """What lets tokens see each other."""
        return self.linear_attn if self.is_recurrent else self.self_attn

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """[T, D] -> [T, D]"""
        hidden = self.mixer(self.input_layernorm(hidden), hidden, step)
        return self.mlp(self.post_attention_layernorm(hidden), hidden)
