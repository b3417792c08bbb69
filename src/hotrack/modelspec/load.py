"""The ModelSpec of local model files."""

from pathlib import Path

from hotrack.modelspec.fields import read_json_object
from hotrack.modelspec.gguf import read_gguf_header, spec_from_gguf
from hotrack.modelspec.parse import parse_config
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
