"""SmolLM2-135M in float32 against transformers: 20 prompts, 64 tokens each, the same tokens forced on
both."""

import pytest
import torch
from torch import Tensor

from fakes.paged_runner import PagedRunner, SequenceState, load_model
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.tokenizer import load_tokenizer
from hotrack.hub.demo import SMOLLM2
from hotrack.modelspec import ModelSpec

RESOLVED = SMOLLM2.resolved()
pytestmark = pytest.mark.skipif(RESOLVED is None, reason="smollm2 is not in the cache")

TOLERANCE = 1e-3
STEPS = 64
TOPICS = ["the sea", "prime numbers", "a lost key", "bread", "the year 1969", "rivers", "C++", "a short poem",
          "trains", "volcanoes"]  # fmt: skip
FORMS = ["Write one sentence about {}.", "<|im_start|>user\nWhat is {}?<|im_end|>\n<|im_start|>assistant\n"]
PROMPTS = [form.format(topic) for topic in TOPICS for form in FORMS]


def theirs(spec: ModelSpec, weights: dict[str, Tensor]):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads, rms_norm_eps=spec.rms_norm_eps, rope_theta=spec.rope.theta,
        max_position_embeddings=spec.max_position_embeddings, tie_word_embeddings=spec.tie_word_embeddings,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not a weight
    return model.eval()


def greedy(runner: PagedRunner, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens [20, STEPS] of our own greedy decoding and the logits [20, STEPS, V] that chose them."""
    sequences = [SequenceState() for _ in prompts]
    logits = runner.step(list(zip(sequences, prompts, strict=True)))
    last = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    steps, tokens = [logits[last]], [logits[last].argmax(-1)]
    while len(steps) < STEPS:
        steps.append(runner.step([(s, t) for s, t in zip(sequences, tokens[-1].split(1), strict=True)]))
        tokens.append(steps[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(steps, 1)


def test_logits_match_transformers() -> None:
    assert RESOLVED is not None
    tokenizer = load_tokenizer(RESOLVED).tokenizer
    prompts = [torch.tensor(tokenizer.encode(text).ids) for text in PROMPTS]
    with open_checkpoint(RESOLVED) as checkpoint:
        spec = checkpoint.spec
        weights = {name: checkpoint.read(name, torch.float32) for name in checkpoint.names()}
    tokens, ours = greedy(PagedRunner(load_model(spec, weights)), prompts)
    reference = theirs(spec, weights)
    for prompt, forced, got in zip(prompts, tokens, ours, strict=True):
        with torch.no_grad():
            ids = torch.cat((prompt, forced[:-1]))[None]
            want = reference(ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert (got - want).abs().max() <= TOLERANCE
        top = want.topk(2, -1)
        clear = top.values[:, 0] - top.values[:, 1] > TOLERANCE
        assert torch.equal(got.argmax(-1)[clear], top.indices[clear, 0])
