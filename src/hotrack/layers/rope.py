"""Rotary embedding frequencies of the published scaling schemes."""

import math

import torch
from torch import Tensor

from hotrack.core.errors import CheckpointError
from hotrack.kernels.base import Ops
from hotrack.modelspec.spec import RopeSpec


def inverse_frequencies(rope: RopeSpec, device: torch.device) -> tuple[Tensor, float]:
    """float32 [dim / 2] and the factor on cos and sin.

    'default'  theta^(-2i/dim) (Su et al., 2021)
    'linear'   divided by ``factor`` (position interpolation, Chen et al., 2023)
    'llama3'   low frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1)
    'yarn'     interpolation by part (Peng et al., 2023)
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return freq, 1.0
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(freq, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(freq, rope)
    raise CheckpointError(
        f"rope scaling {rope.kind!r} is not supported; supported are default, linear, llama3 and yarn"
    )


def _llama3(freq: Tensor, rope: RopeSpec) -> Tensor:
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    # Turns of each pair over the original context: above `high` keep, below `low` interpolate.
    turns = rope.params["original_max_position_embeddings"] * freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * keep + freq / rope.factor * (1 - keep)


def _yarn(freq: Tensor, rope: RopeSpec) -> tuple[Tensor, float]:
    context = rope.params["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        """Index of the pair that makes ``times`` turns over the original context."""
        return rope.dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair_turning(rope.params.get("beta_fast", 32.0))
    high = pair_turning(rope.params.get("beta_slow", 1.0))
    if rope.params.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = (
        (torch.arange(rope.dim // 2, dtype=torch.float32, device=freq.device) - low) / (high - low)
    ).clamp(0, 1)
    scaled = freq / rope.factor * ramp + freq * (1 - ramp)
    default = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return scaled, rope.params.get("attention_factor", default)


class RotaryEmbedding:
    """Makes the step's cos and sin rows from positions, so that no table grows with the context length."""

    def __init__(self, rope: RopeSpec, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.ops = ops
        self.dtype = dtype
        self.inv_freq, self.scale = inverse_frequencies(rope, device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cos, sin [T, 1, dim]"""
        return self.ops.rope_tables(positions, self.inv_freq, self.scale, self.dtype)
