"""A quantised checkpoint in the engine: the tokens of its dequantised weights, on one rank and two, also
after its weights were dropped and read again."""

import json

import pytest
from safetensors.torch import save_file

from fakes.quantised_checkpoints import write_quantised
from fakes.tiny_checkpoints import write_tokenizer
from hotrack.core.sampling import SamplingParams
from hotrack.engine.llm import LLM

OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 128}
PROMPTS = [[5, 9, 2, 77], [300, 20, 411, 8, 8, 8, 8, 1, 90]]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["fp8", "mxfp4"])
def folders(request, tmp_path_factory):
    """A quantised checkpoint, and one of its dequantised weights in float32."""
    quantised, plain = tmp_path_factory.mktemp("quantised"), tmp_path_factory.mktemp("plain")
    values = write_quantised(quantised, "qwen3_moe", experts=request.param, seed=4)
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(values, plain / "model.safetensors")
    write_tokenizer(plain)
    return quantised, plain


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_tokens_of_the_dequantised_weights(folders):
    quantised, plain = folders
    with LLM(str(plain), **OPTIONS) as llm:
        expected = tokens(llm)
    with LLM(str(quantised), **OPTIONS) as llm:
        assert tokens(llm) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected, f"{level=}"


@pytest.mark.e2e
def test_two_ranks(folders):
    quantised, plain = folders
    with LLM(str(plain), **OPTIONS) as llm:
        expected = tokens(llm)
    with LLM(str(quantised), tensor_parallel_size=2, **OPTIONS) as llm:
        assert tokens(llm) == expected
