"""The demo's verdict must be able to say no."""

from dataclasses import replace
from typing import Any

import pytest

from hotrack.cli.demo_script import (
    Answer,
    DemoModel,
    Outcome,
    Reference,
    check,
    choose_budget,
    identical,
    pool_file,
)
from hotrack.config.pool_file import load_pool_text
from hotrack.gateway.build import check_budget

MIB = 1 << 20


def reference(model: str, awake: int, asleep: int, weights: int) -> Reference:
    answers = tuple(Answer(model, f"q{turn}", "t", (turn, 1)) for turn in range(2))
    return Reference(answers, awake * MIB - 1, awake * MIB, asleep * MIB, weights * MIB)


def swap(victim: str | None, target: str, before: int = 500, after: int = 200) -> dict[str, Any]:
    return {
        "from": [victim] if victim else [],
        "to": target,
        "result": "ok",
        "canary": "identical",
        "victim_bytes_before": before * MIB if victim else None,
        "victim_bytes_after": after * MIB if victim else None,
    }


def good() -> Outcome:
    references = {"a": reference("a", 600, 230, 250), "b": reference("b", 450, 200, 4)}
    answers = [Answer(model, f"q{turn}", "t", (turn, 1)) for turn in range(2) for model in ("a", "b")]
    swaps = [swap(None, "a"), swap("a", "b"), swap("b", "a", 206, 200), swap("a", "b")]
    return Outcome(choose_budget(references), references, answers, swaps)


def test_all_checks_hold_for_a_good_run() -> None:
    outcome = good()
    check(outcome)
    assert outcome.ok, outcome.checks


def test_nothing_checked_is_not_ok() -> None:
    assert not good().ok


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda o: o.swaps.pop(), "every question swapped"),
        (lambda o: o.swaps.insert(2, swap("a", "b")), "every question swapped"),
        (lambda o: o.swaps[1].update(result="wake_failed"), "every question swapped"),
        (lambda o: o.swaps[1].update(victim_bytes_after=400 * MIB), "memory fell"),
        (lambda o: o.swaps[1].update(victim_bytes_after=None), "memory fell"),
        (lambda o: o.swaps[3].update(canary=""), "canaries"),
        (lambda o: o.answers.__setitem__(2, replace(o.answers[2], complete=False)), "stream was complete"),
        (lambda o: o.answers.__setitem__(3, replace(o.answers[3], token_ids=(1, 2))), "tokens identical"),
        (lambda o: o.answers.__setitem__(3, replace(o.answers[3], token_ids=())), "tokens identical"),
        (lambda o: setattr(o, "budget_bytes", 2000 * MIB), "only one of them"),
    ],
)
def test_each_check_can_fail(spoil: Any, words: str) -> None:
    outcome = good()
    spoil(outcome)
    check(outcome)
    failed = [name for name, held in outcome.checks.items() if not held]
    assert any(words in name for name in failed)
    assert not outcome.ok


def test_an_answer_to_another_question_is_not_identical() -> None:
    outcome = good()
    assert identical(outcome, outcome.answers[0])
    assert not identical(outcome, replace(outcome.answers[0], question="q1"))


def test_the_demos_pool_file_is_valid_and_holds_one_at_a_time() -> None:
    import yaml

    outcome = good()
    models = tuple(DemoModel(name, f"/{name}", ("q0", "q1"), "64MiB") for name in ("a", "b"))
    content = pool_file(models, outcome.references, 1024, outcome.budget_bytes)
    config = load_pool_text(yaml.safe_dump(content))
    check_budget(config, {})
    budget = config.pool.memory.budget_bytes or 0
    assert sum(model.memory.awake_bytes or 0 for model in config.models.values()) > budget
    assert budget > 600 * MIB + 200 * MIB
