"""A published FP8 checkpoint through the engine, against transformers' own reading of the same files."""

import pytest
import torch

from fakes.paged_runner import CPU, PagedRunner, SequenceState, allocate
from fakes.quantised_checkpoints import write_quantised
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.hub.resolve import resolve
from hotrack.models.registry import build_model

IDS = torch.randint(0, 512, (60,), generator=torch.Generator().manual_seed(5))
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("family", "options"), [("llama", {}), ("qwen3_moe", {"moe_intermediate_size": 128})]
)
def test_logits_of_transformers_dequantised(family, options, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizer

    # It asks for accelerate whatever the device; nothing of it is called to dequantise on a CPU.
    monkeypatch.setattr(quantizer, "is_accelerate_available", lambda: True)
    write_quantised(tmp_path, family, block=(128, 128), num_hidden_layers=2, **WIDE, **options)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        attn_implementation="eager",
        dtype=torch.float32,
    ).eval()
    with torch.no_grad():
        expected = theirs(IDS[None], use_cache=False).logits[0]
    assert expected.std() >= 0.5
    with open_checkpoint(resolve(str(tmp_path))) as checkpoint:
        model = build_model(
            checkpoint.spec, dtype=torch.float32, device=CPU, tp=TensorParallel(), allocate=allocate
        )
        load_weights(checkpoint, model.load_plan(), num_threads=1)
    model.after_load()
    found = PagedRunner(model).step([(SequenceState(), IDS)])
    assert (found - expected).abs().max() <= 1e-4
