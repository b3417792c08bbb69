"""Rotary frequencies of every scaling scheme against transformers."""

import pytest
import torch

from hotrack.core.errors import CheckpointError
from hotrack.layers.rope import inverse_frequencies
from hotrack.modelspec import RopeSpec

CPU = torch.device("cpu")
SCALING = {
    "linear": (4.0, {}),
    "llama3": (
        8.0,
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    ),
    "yarn": (16.0, {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}),
}


@pytest.mark.parametrize("kind", SCALING)
def test_scaled_frequencies(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factor, params = SCALING[kind]
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, "factor": factor, **params},
    )
    want, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    got, scale = inverse_frequencies(RopeSpec(5e5, 128, kind, factor, params), CPU)
    assert torch.allclose(got, want, rtol=1e-6, atol=0)
    assert scale == pytest.approx(attention_factor)
    assert not torch.allclose(got, inverse_frequencies(RopeSpec(5e5, 128), CPU)[0], rtol=1e-3)


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(CheckpointError, match="'longrope'"):
        inverse_frequencies(RopeSpec(1e4, 64, "longrope"), CPU)
