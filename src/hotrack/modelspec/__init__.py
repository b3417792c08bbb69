"""config.json / GGUF metadata -> typed ModelSpec; weight and KV byte arithmetic. Torch-free."""

from hotrack.modelspec.parse import load_spec, parse_config
from hotrack.modelspec.spec import ModelSpec, MoeSpec, RopeSpec

__all__ = ["ModelSpec", "MoeSpec", "RopeSpec", "load_spec", "parse_config"]
