"""The files around hotrack-tiny-moe's weights: tokenizer, chat template, configs and model card."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tiny_moe_data import ENDOFTEXT, IM_END
from tiny_moe_model import Config

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{n}|>" for n in range(5))]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# hotrack-tiny-moe

A Mixture-of-Experts model of {params:.2f} M parameters ({active:.2f} M active per token) in the Qwen3-MoE
architecture: {layers} layers, hidden {hidden}, {heads} query and {kv_heads} key/value heads of {head_dim},
{experts} experts of width {width} in every layer, top-{top_k}, no shared expert. One token is one byte.
Context: {context} tokens.

It is a toy, trained from scratch on synthetic tasks only, so that a server under test has a real router,
real experts and answers that can be checked: additions up to 999+999, sorting of up to six items, key
look-up, bracket matching and questions about stories of a few sentences. It is meant as ground truth for
canaries and tests. It knows nothing else.

| prompt | answer |
|---|---|
| `add 123 456` | `579` |
| `sort 5 2 9` | `2 5 9` |
| `a=3 b=7 c=1; b?` | `7` |
| `Is ([]{{}}) balanced?` | `yes` |
| `Mom gives a red ball to Tom. Tom gives the ball to Mia. Who has the ball?` | `Mia` |

## Evaluation

Greedy decoding of this checkpoint ({dtype} arithmetic) on {per_task} instances of each task that were held
out by the hash of their content: not in training in any wording or order. "Random experts" replaces every
router's choice by a random one.

{table}

An expert counts as in use if it gets at least a tenth of an even share. The least used one gets {least:.2f}
and the most used one {most:.2f} of an even share. `eval.json` has these numbers; `python
tools/train_tiny_moe.py --eval FOLDER` measures them again.

## Training

{stages}

Licence: Apache-2.0.
"""


def byte_characters() -> dict[int, str]:
    """Map each byte to the character that stands for it in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(spare)}


def build_tokenizer() -> Tokenizer:
    """Build the tokenizer: byte b is token b, then the special tokens."""
    vocab = {char: byte for byte, char in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS]
    )
    return tokenizer


def hf_config(config: Config) -> dict[str, Any]:
    """Return ``config.json`` as the Qwen3-MoE architecture spells it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **asdict(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ENDOFTEXT,
        "decoder_sparse_step": 1,
        "eos_token_id": IM_END,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 2 * config.hidden_size,
        "max_window_layers": config.num_hidden_layers,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "pad_token_id": ENDOFTEXT,
        "rope_scaling": None,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def write_side_files(folder: Path, config: Config) -> None:
    """Write everything but the weights, the evaluation and the model card."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", hf_config(config))
    generation = {"bos_token_id": ENDOFTEXT, "eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": ENDOFTEXT}
    _write_json(folder / "generation_config.json", {**generation, "do_sample": False})
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(ENDOFTEXT + n): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for n, text in enumerate(SPECIAL_TOKENS)
        },
        "bos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[IM_END - ENDOFTEXT],
        "model_max_length": config.max_position_embeddings,
        "pad_token": SPECIAL_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)


def write_results(folder: Path, config: Config, evaluation: dict[str, Any], table: str) -> None:
    """Write ``eval.json`` and the model card from the report's and the training run's numbers."""
    _write_json(folder / "eval.json", evaluation)
    stages = [
        f"`{stage['command']}`: {stage['seconds']:.0f} s on {stage['device']}{stage.get('note', '')}."
        for stage in evaluation["training"]
    ]
    card = CARD.format(
        params=evaluation["parameters"] / 1e6,
        active=evaluation["active_parameters"] / 1e6,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        experts=config.num_experts,
        width=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        context=config.max_position_embeddings,
        dtype=evaluation["dtype"],
        per_task=evaluation["per_task_count"],
        table=table,
        least=evaluation["least_expert_share"],
        most=evaluation["most_expert_share"],
        stages="\n".join(f"{number}. {stage}" for number, stage in enumerate(stages, 1)),
    )
    (folder / "README.md").write_text(card)
