"""One file per model family, and the registry."""

from hotrack.models.causal_lm import Allocate, CausalLM
from hotrack.models.registry import MODELS, build_model

__all__ = ["MODELS", "Allocate", "CausalLM", "build_model"]
