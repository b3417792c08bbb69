"""What the demo asks, measures and checks. No terminal here."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotrack.cli.http import Api, ServerError

MIB = 1 << 20
MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class DemoModel:
    """One of the two. ``questions``: one per turn. ``flags``: engine options, as written in a pool file."""

    name: str
    model: str
    questions: tuple[str, str]
    kv_cache: str


@dataclass(frozen=True, slots=True)
class Answer:
    """``token_ids`` decide whether two answers are the same. ``complete``: a stream ended with ``[DONE]``."""

    model: str
    question: str
    text: str
    token_ids: tuple[int, ...]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Reference:
    """One engine alone: its answers before it ever slept, then what one sleep shows.

    ``awake_bytes``: most it may hold, with its KV cache full. ``weight_bytes``: what its host copy holds, so
    the least that must leave when it sleeps.
    """

    answers: tuple[Answer, ...]
    resident_bytes: int
    awake_bytes: int
    asleep_bytes: int
    weight_bytes: int


@dataclass(slots=True)
class Outcome:
    """Everything measured, and every check by name."""

    budget_bytes: int
    references: dict[str, Reference]
    answers: list[Answer]
    swaps: list[dict[str, Any]]
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(self.checks.values())


def ask(api: Api, model: str, question: str, *, stream: bool, echo: Callable[[str], None]) -> Answer:
    """One greedy answer; ``echo`` gets its text as it arrives."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "stream": stream,
    }
    if stream:
        return _ask_streaming(api, model, question, body, echo)
    choice = api.post("/v1/chat/completions", body)["choices"][0]
    text = choice["message"]["content"] or ""
    echo(text)
    return Answer(model, question, text, tuple(choice["token_ids"]))


def _ask_streaming(
    api: Api, model: str, question: str, body: dict[str, Any], echo: Callable[[str], None]
) -> Answer:
    text, complete = "", False
    token_ids: list[int] = []
    for line in api.stream("/v1/chat/completions", body):
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            complete = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise ServerError(event["error"]["message"], status_code=200, code=event["error"]["code"])
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            token_ids += choice.get("token_ids") or []
            echo(piece)
    return Answer(model, question, text, tuple(token_ids), complete)


def choose_budget(references: dict[str, Reference]) -> int:
    """Half way between what one model awake (the other asleep) needs and what both awake would need."""
    awake = {name: reference.awake_bytes for name, reference in references.items()}
    asleep = {name: reference.asleep_bytes for name, reference in references.items()}
    one = max(awake[name] + sum(asleep.values()) - asleep[name] for name in awake)
    both = sum(awake.values())
    return one + (both - one) // 2


def pool_file(
    models: tuple[DemoModel, ...], references: dict[str, Reference], max_model_len: int, budget_bytes: int
) -> dict[str, Any]:
    """Content of the demo's pool file."""
    return {
        "models": {
            model.name: {
                "model": model.model,
                "engine": {"max_model_len": max_model_len, "kv_cache_memory": model.kv_cache},
                "memory": {"awake": f"{references[model.name].awake_bytes // MIB + 1}MiB"},
            }
            for model in models
        },
        "pool": {
            "memory": {"budget": f"{budget_bytes // MIB}MiB"},
            "policy": {"min_residency": "0s"},
        },
    }


def check(outcome: Outcome) -> None:
    """Fill in ``outcome.checks``; each is something that a status code alone could not show."""
    order = [answer.model for answer in outcome.answers]
    swaps = outcome.swaps
    victims = [[], *([name] for name in order[:-1])]
    awake = sum(reference.awake_bytes for reference in outcome.references.values())
    outcome.checks = {
        "the budget holds only one of them awake": awake > outcome.budget_bytes,
        "every question swapped the models": [swap["to"] for swap in swaps] == order
        and [swap["from"] for swap in swaps] == victims
        and all(swap["result"] == "ok" for swap in swaps),
        "memory fell by the weights at every sleep": len(swaps) == len(order)
        and all(_fell(swap, outcome.references) for swap in swaps[1:]),
        "canaries identical after every wake": all(swap["canary"] == "identical" for swap in swaps),
        "the stream was complete": all(answer.complete for answer in outcome.answers),
        "tokens identical to a never-slept engine": all(
            identical(outcome, answer) for answer in outcome.answers
        ),
    }


def identical(outcome: Outcome, answer: Answer) -> bool:
    """True when the engine that never slept gave exactly these tokens for that question."""
    return any(
        known.question == answer.question and known.token_ids == answer.token_ids and answer.token_ids
        for known in outcome.references[answer.model].answers
    )


def _fell(swap: dict[str, Any], references: dict[str, Reference]) -> bool:
    before, after = swap["victim_bytes_before"], swap["victim_bytes_after"]
    if before is None or after is None or not swap["from"]:
        return False
    return bool(before - after >= references[swap["from"][0]].weight_bytes > 0)
