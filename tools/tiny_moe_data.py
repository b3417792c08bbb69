"""Token rows for training hotrack-tiny-moe: byte tokens, the chat format, a bounded stream of shards."""

from __future__ import annotations

import multiprocessing
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiny_moe_tasks import SAMPLERS, draw, sample_story_turns, sample_tale, sample_talk, split_of

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
"""Token ids below 256 are bytes; 259 to 263 are reserved."""

PROMPT, ANSWER, TEXT = 0, 1, 2
"""Loss classes: prompts and the template; checkable answers and their <|im_end|>; tales and small talk."""

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are hotrack-tiny-moe.", "Answer briefly.", "Be brief.")
MIXTURE = {
    "add": 0.2,
    "sort": 0.13,
    "lookup": 0.17,
    "bracket": 0.17,
    "story": 0.27,
    "tale": 0.03,
    "talk": 0.03,
}
RAW_TEXT_SHARE = 0.05
SYSTEM_SHARE = 0.2


def encode_turn(role: str, content: str) -> list[int]:
    """Encode one turn as the chat template writes it."""
    return [IM_START, *f"{role}\n{content}".encode(), IM_END, 10]


def encode_prompt(turns: Sequence[tuple[str, str]]) -> list[int]:
    """Encode (role, content) turns and the header after which the assistant speaks."""
    ids = [token for role, content in turns for token in encode_turn(role, content)]
    return [*ids, IM_START, *b"assistant\n"]


def draw_exchanges(rng: random.Random) -> list[tuple[str, str, int]]:
    """Draw (prompt, answer, loss class of the answer) to train on; a story has more questions on it."""
    kind = rng.choices(list(MIXTURE), weights=list(MIXTURE.values()))[0]
    if kind == "story":
        while True:
            first, more = sample_story_turns(rng)
            if split_of(first.key) == "train":
                turns = [(first.prompt, first.answer), *more]
                return [(prompt, answer, ANSWER) for prompt, answer in turns]
    if kind in SAMPLERS:
        instance = draw(kind, rng, "train")
        return [(instance.prompt, instance.answer, ANSWER)]
    return [(*(sample_tale(rng) if kind == "tale" else sample_talk(rng)), TEXT)]


def build_row(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Build ``length + 1`` tokens and loss classes: one conversation or raw tales, cut at the end."""
    ids: list[int] = []
    classes: list[int] = []
    raw = rng.random() < RAW_TEXT_SHARE
    if raw and rng.random() < 0.5:
        ids, classes = [ENDOFTEXT], [PROMPT]
    elif not raw and rng.random() < SYSTEM_SHARE:
        ids = encode_turn("system", rng.choice(SYSTEM_PROMPTS))
        classes = [PROMPT] * len(ids)
    while len(ids) <= length:
        if raw:
            story = [*sample_tale(rng)[1].encode(), ENDOFTEXT]
            ids += story
            classes += [TEXT] * len(story)
            continue
        for question, reply, loss_class in draw_exchanges(rng):
            prompt = encode_prompt([("user", question)])
            answer = [*reply.encode(), IM_END]
            ids += [*prompt, *answer, 10]
            classes += [PROMPT] * len(prompt) + [loss_class] * len(answer) + [PROMPT]
    return ids[: length + 1], classes[: length + 1]


def build_shard(seed: int, index: int, rows: int, length: int) -> npt.NDArray[np.int16]:
    """Build shard ``index`` of the stream: [2, rows, length + 1], tokens then loss classes."""
    rng = random.Random(f"{seed}/shard/{index}")
    return np.array([build_row(rng, length) for _ in range(rows)], dtype=np.int16).transpose(1, 0, 2)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training: ``steps`` batches of ``rows`` rows of ``length`` tokens."""

    steps: int
    rows: int
    length: int


def stream_batches(
    seed: int, phases: Sequence[Phase], workers: int, passes: int = 2, steps_per_shard: int = 8
) -> Iterator[npt.NDArray[np.int16]]:
    """Yield one [2, rows, length + 1] batch per step; the number of workers does not change their order.

    A shard serves ``passes`` times in a row, its rows reordered, so that making data does not limit a device.
    """
    jobs: list[tuple[int, int, int, int]] = []
    plan: list[tuple[int, int]] = []  # (rows per step, steps) of each job
    for phase in phases:
        for start in range(0, phase.steps, steps_per_shard * passes):
            steps = min(steps_per_shard * passes, phase.steps - start)
            jobs.append((seed, len(jobs), phase.rows * min(steps, steps_per_shard), phase.length))
            plan.append((phase.rows, steps))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting = deque(pool.apply_async(build_shard, job) for job in jobs[: 2 * workers])
        following = iter(jobs[2 * workers :])
        for index, (rows, steps) in enumerate(plan):
            shard = waiting.popleft().get()
            if (job := next(following, None)) is not None:
                waiting.append(pool.apply_async(build_shard, job))
            order = np.random.default_rng((seed, index))
            for step in range(steps):
                at = step * rows % shard.shape[1]
                if step and at == 0:
                    shard = shard[:, order.permutation(shard.shape[1])]
                yield shard[:, at : at + rows]
