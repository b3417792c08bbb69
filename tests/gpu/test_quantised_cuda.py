"""Quantised checkpoints on a GPU: the tokens of their dequantised weights; the formats on the device."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fakes.quantised_checkpoints import write_quantised
from fakes.tiny_checkpoints import write_tokenizer
from hotrack.core.sampling import SamplingParams
from hotrack.engine.llm import LLM
from hotrack.kernels.reference.quant import (
    decode_e8m0,
    dequantise_fp8,
    dequantise_mxfp4,
    encode_e8m0,
    quantise_fp8,
    quantise_mxfp4,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # "a prototype feature" of torch's
]

OPTIONS = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20}
PROMPTS = [[5, 9, 2, 77], [300, 20, 411, 8, 8, 8, 8, 1, 90]]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def tokens(folder: Path, *levels: int) -> list[list[list[int]]]:
    """Before and after a sleep of each level."""
    found = []
    with LLM(str(folder), **OPTIONS) as llm:
        found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
        for level in levels:
            llm.sleep(level)
            llm.wake_up()
            found.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)])
    return found


def test_engine(tmp_path: Path) -> None:
    quantised, plain = tmp_path / "quantised", tmp_path / "plain"
    values = write_quantised(quantised, "qwen3_moe", experts="mxfp4", seed=4)
    plain.mkdir()
    config = json.loads((quantised / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(values, plain / "model.safetensors")
    write_tokenizer(plain)
    expected = tokens(plain)[0]
    assert tokens(quantised, 1, 2) == [expected] * 3


def test_stored_values_mean_the_same_on_the_device() -> None:
    x = torch.randn(384, 512, generator=torch.Generator().manual_seed(2))
    weight, scale = quantise_fp8(x, (128, 128))
    found = dequantise_fp8(weight.cuda(), scale.cuda(), (128, 128))
    assert torch.equal(found.cpu(), dequantise_fp8(weight, scale, (128, 128)))
    packed, scale = quantise_mxfp4(x)
    found = dequantise_mxfp4(packed.cuda(), decode_e8m0(encode_e8m0(scale).cuda()))
    assert torch.equal(found.cpu(), dequantise_mxfp4(packed, scale))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantising_on_the_device(power_of_two: bool) -> None:
    """CUDA divides by a number through its reciprocal, so scales may differ in their last bit."""
    x = torch.randn(384, 512, generator=torch.Generator().manual_seed(2))
    weight, scale = quantise_fp8(x.cuda(), (128, 128), power_of_two=power_of_two)
    back = dequantise_fp8(weight, scale, (128, 128)).cpu()
    smallest = scale.max().item() * 2.0**-10
    assert ((back - x).abs() <= torch.clamp(x.abs() / 16, min=smallest) * 1.0001).all()
    packed, scale = quantise_mxfp4(x.cuda())
    error = (dequantise_mxfp4(packed, scale).cpu() - x).abs().view(384, -1, 32).amax(2)
    assert (error <= scale.cpu()).all()
