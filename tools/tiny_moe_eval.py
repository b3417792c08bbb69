"""Held-out evaluation of hotrack-tiny-moe: greedy answers with routed and random experts; experts in use."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tiny_moe_data import IM_END, draw_exchanges, encode_prompt
from tiny_moe_model import TinyMoe, greedy
from tiny_moe_tasks import SAMPLERS, Instance, Split, draw_set

TEST_SEED = 20_011
"""Seed of the evaluation's instances; training uses other seeds and, by hash split, other content."""

IN_USE_SHARE = 0.1
"""An expert is in use if it gets at least this fraction of an even share of its layer's assignments."""

MAX_NEW_TOKENS = 40


@dataclass(frozen=True, slots=True)
class Answered:
    """Greedy answers to a set of instances, and [layers][experts] counts of the routers' choices."""

    texts: list[str]
    counts: list[list[int]]


@dataclass(slots=True)
class Report:
    """What ``eval.json`` holds: shares of right answers by task and overall, and how the experts are used."""

    per_task_count: int
    accuracy: dict[str, float]
    overall: float
    later_turn: float
    random_routing: dict[str, float]
    random_routing_overall: float
    experts_in_use: float
    least_expert_share: float
    most_expert_share: float
    dtype: str
    examples: list[dict[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, shares rounded to four places."""

        def rounded(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: rounded(inner) for key, inner in value.items()}
            return round(value, 4) if isinstance(value, float) else value

        return {name: rounded(value) for name, value in asdict(self).items()}

    def table(self) -> str:
        """Render the report for a terminal, or for Markdown."""
        lines = ["| task | right | random experts |", "|---|---:|---:|"]
        lines += [f"| {t} | {self.accuracy[t]:.1%} | {self.random_routing[t]:.1%} |" for t in self.accuracy]
        scrambled = f"{self.random_routing_overall:.1%}"
        lines += [
            f"| **overall** ({self.per_task_count} each) | **{self.overall:.1%}** | {scrambled} |",
            f"| as a later turn of a conversation | {self.later_turn:.1%} | |",
            f"| experts in use | {self.experts_in_use:.1%} | |",
        ]
        return "\n".join(lines)


def answer_all(
    model: TinyMoe,
    instances: Sequence[Instance],
    *,
    random_seed: int | None = None,
    history_seed: int | None = None,
) -> Answered:
    """Answer every instance greedily; with ``history_seed``, after one to three other exchanges."""
    rng = random.Random(history_seed)
    prompts: list[list[int]] = []
    for instance in instances:
        turns: list[tuple[str, str]] = []
        for _ in range(0 if history_seed is None else rng.randint(1, 3)):
            question, reply, _ = draw_exchanges(rng)[0]
            turns += [("user", question), ("assistant", reply)]
        prompts.append(encode_prompt([*turns, ("user", instance.prompt)]))
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts = [""] * len(prompts)
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.double)
    batch = 1024 if model.lm_head.weight.is_cuda else 128
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        seed = None if random_seed is None else random_seed + start
        answers, used = greedy(model, [prompts[r] for r in rows], IM_END, MAX_NEW_TOKENS, seed)
        counts += used
        for row, answer in zip(rows, answers, strict=True):
            texts[row] = bytes(token for token in answer if token < 256).decode(errors="replace")
    return Answered(texts, [[int(n) for n in layer] for layer in counts.tolist()])


def right_by_task(instances: Sequence[Instance], texts: Sequence[str]) -> dict[str, float]:
    """Return the share of exactly right answers for each task."""
    shares: dict[str, float] = {}
    for task in SAMPLERS:
        hits = [text == i.answer for i, text in zip(instances, texts, strict=True) if i.task == task]
        shares[task] = sum(hits) / len(hits)
    return shares


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def evaluate(model: TinyMoe, per_task: int, split: Split = "test", seed: int = TEST_SEED) -> Report:
    """Evaluate on ``per_task`` unseen instances of each task."""
    instances = draw_set(seed, split, per_task)
    routed = answer_all(model, instances)
    scrambled = answer_all(model, instances, random_seed=seed)
    half = instances[::2]
    later = answer_all(model, half, history_seed=seed)
    accuracy = right_by_task(instances, routed.texts)
    randomised = right_by_task(instances, scrambled.texts)
    shares = [n * len(layer) / sum(layer) for layer in routed.counts for n in layer]
    shown = [index for task in range(len(SAMPLERS)) for index in range(task * per_task, task * per_task + 2)]
    return Report(
        per_task_count=per_task,
        accuracy=accuracy,
        overall=mean(list(accuracy.values())),
        later_turn=mean([text == instance.answer for text, instance in zip(later.texts, half, strict=True)]),
        random_routing=randomised,
        random_routing_overall=mean(list(randomised.values())),
        experts_in_use=mean([share >= IN_USE_SHARE for share in shares]),
        least_expert_share=min(shares),
        most_expert_share=max(shares),
        dtype=str(model.lm_head.weight.dtype).removeprefix("torch."),
        examples=[{"prompt": instances[i].prompt, "answer": routed.texts[i]} for i in shown],
    )
