"""A Qwen3-Next checkpoint as transformers saves it, served in chunks, against transformers' own decoding."""

from pathlib import Path

import pytest
import torch

from hotrack import LLM, SamplingParams

COUNT = 16


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_greedy_tokens(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16,
        linear_num_key_heads=4, linear_num_value_heads=8, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_experts_per_tok=2, num_experts=8,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(2)
    for name, param in theirs.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if "norm" in name:
            param.data.copy_(("linear_attn" in name) + 0.2 * noise)
        else:
            param.data.copy_((1.0 if name.endswith(("A_log", "dt_bias")) else 0.08) * noise)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 512, (1, 100), generator=generator)
    with torch.no_grad():
        for _ in range(COUNT):
            values, tokens = theirs(ids).logits[:, -1].topk(2)
            assert values[0, 0] - values[0, 1] > 2e-3, "choose another seed: this token is a toss-up"
            ids = torch.cat((ids, tokens[:, :1]), 1)
    options = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_model_len": 256}
    with LLM(str(tmp_path), skip_tokenizer_init=True, max_num_batched_tokens=40, **options) as llm:
        greedy = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        for _ in range(2):  # the second time with a prefix hit
            (found,) = llm.generate([ids[0, :100].tolist()], greedy)
            assert list(found.outputs[0].token_ids) == ids[0, 100:].tolist()
