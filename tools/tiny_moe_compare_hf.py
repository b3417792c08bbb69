"""Check that transformers loads hotrack-tiny-moe and gives the same greedy answers as the tool's own model.

python tools/tiny_moe_compare_hf.py FOLDER          # needs transformers
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_moe_data import IM_END, encode_prompt
from tiny_moe_eval import MAX_NEW_TOKENS, TEST_SEED
from tiny_moe_model import greedy, load_model
from tiny_moe_tasks import draw_set


@torch.inference_mode()
def main() -> None:
    """Compare logits in float32, then greedy answers, tokenizer and chat template in bfloat16."""
    folder = Path(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    instances = draw_set(TEST_SEED, "test", 5)
    chats = [[{"role": "user", "content": i.prompt}] for i in instances]
    prompts = [encode_prompt([("user", i.prompt)]) for i in instances]
    for chat, prompt in zip(chats, prompts, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer(text)["input_ids"] == prompt, f"template or tokenizer differs: {text!r}"

    own, other = (
        load_model(folder, torch.float32, device),
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
    )
    other = other.to(device).eval()
    worst = 0.0
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        worst = max(worst, (own(ids)[0] - other(ids).logits).abs().max().item())
    print(f"largest difference of a float32 logit over {len(prompts)} prompts: {worst:.2e}")

    own = load_model(folder, torch.bfloat16, device)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    answers, _ = greedy(own, prompts, IM_END, MAX_NEW_TOKENS)
    same = 0
    for instance, prompt, answer in zip(instances, prompts, answers, strict=True):
        out = other.generate(
            torch.tensor([prompt], device=device), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        agree = text == tokenizer.decode(answer)
        same += agree
        print(f"{'=' if agree else '!'} {instance.prompt!r} -> {text!r}, right {instance.answer!r}")
    print(f"same bfloat16 greedy answer on {same} of {len(prompts)} prompts; {type(other).__name__}")


if __name__ == "__main__":
    main()
