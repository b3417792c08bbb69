"""The ModelSpec and the profile of local model files."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

from hotrack.modelspec.deepseek_v4 import deepseek_v4_profile
from hotrack.modelspec.fields import Fields, read_json_object
from hotrack.modelspec.gguf import GgufHeader, read_gguf_header, spec_from_gguf
from hotrack.modelspec.inventory import profile_of
from hotrack.modelspec.parse import ARCHITECTURES, parse_config
from hotrack.modelspec.profile import Profile
from hotrack.modelspec.spec import ModelSpec


def load_spec(path: Path) -> ModelSpec:
    """Read a model folder (``config.json``, stop ids of ``generation_config.json``) or a GGUF file.

    Raises CheckpointError when a file is missing, damaged or describes something hotrack does not serve.
    """
    if path.suffix == ".gguf":
        return spec_from_gguf(read_gguf_header(path))
    config = read_json_object(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():
        eos = read_json_object(generation).get("eos_token_id")
        if eos is not None:
            config = {**config, "eos_token_id": eos}
    return parse_config(config, where=str(path / "config.json"))


def load_profile(path: Path) -> Profile:
    """What a model folder (of which only ``config.json`` is read) or a GGUF file takes; also of families that
    this version does not run.

    Raises CheckpointError as :func:`load_spec`.
    """
    if path.suffix == ".gguf":
        return _gguf_profile(read_gguf_header(path))
    where = path / "config.json"
    return profile_config(read_json_object(where), str(where))


def profile_config(config: dict[str, object], where: str = "config.json") -> Profile:
    """What the model that a ``config.json`` object describes takes. Raises CheckpointError."""
    if config.get("model_type") == "deepseek_v4":
        found = deepseek_v4_profile(Fields(config, where))
        return replace(found, served="deepseek_v4" in ARCHITECTURES)
    return profile_of(parse_config(config, where))


def _gguf_profile(header: GgufHeader) -> Profile:
    """As of the same model in its dtype, and what the file holds in words."""
    types = Counter(tensor.type for tensor in header.tensors.values())
    found = profile_of(spec_from_gguf(header))
    return replace(found, quantisation="GGUF " + ", ".join(name for name, _ in types.most_common()))
