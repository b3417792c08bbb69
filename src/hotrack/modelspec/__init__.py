"""config.json / GGUF metadata -> typed ModelSpec; weight and KV byte arithmetic. Torch-free."""

from hotrack.modelspec.load import load_spec
from hotrack.modelspec.parse import parse_config
from hotrack.modelspec.spec import ModelSpec, MoeSpec, RopeSpec

__all__ = ["ModelSpec", "MoeSpec", "RopeSpec", "load_spec", "parse_config"]
