"""Every shape is one that the engine reads."""

import pytest
from make_config import SHAPES, write_config

from hotrack.modelspec import load_spec
from hotrack.modelspec.bytes import num_parameters

BILLIONS = {"qwen3-30b-a3b": 30.5, "qwen3-next-80b-a3b": 79.7, "qwen3-8b": 8.2}


@pytest.mark.parametrize("shape", SHAPES)
def test_shape(shape, tmp_path):
    spec = load_spec(write_config(shape, tmp_path))
    if shape in BILLIONS:
        assert round(num_parameters(spec) / 1e9, 1) == BILLIONS[shape]
