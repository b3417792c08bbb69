"""The task generators of hotrack-tiny-moe: determinism, splits, answers worked out from the prompt alone."""

from __future__ import annotations

import random
import re

import pytest

import tiny_moe_tasks as tasks


def solve_add(prompt: str) -> str:
    return str(sum(int(number) for number in re.findall(r"\d+", prompt)))


def solve_sort(prompt: str) -> str:
    items = re.sub(r"^(sort:?|Sort these:|Sort|Put in order:) ", "", prompt).rstrip(".")
    return " ".join(sorted(items.replace(",", "").split()))


def solve_lookup(prompt: str) -> str:
    body = prompt.removeprefix("Given ")
    pairs = re.findall(
        r"(\w+)(?:=|: | is with | goes to | is )(\w+)", body.replace("what is", "").replace("What is", "")
    )
    asked = re.findall(r"\w+", prompt)[-1]
    return dict(pairs)[asked]


def solve_bracket(prompt: str) -> str:
    text = re.search(r"[()\[\]{}]+", prompt)
    assert text is not None
    rest = text[0]
    while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", rest)) != rest:
        rest = shorter
    if prompt.lower().startswith(("close", "complete")):
        return rest[::-1].translate(str.maketrans("([{", ")]}"))
    return "no" if rest else "yes"


def solve_story(prompt: str) -> str:
    *sentences, question = re.split(r"(?<=[.?]) ", prompt)
    owner, color, place = {}, {}, {}
    for sentence in sentences:
        if given := re.fullmatch(r"\w+ gives (?:the|a (\w+)) (\w+) to (\w+)\.", sentence):
            owner[given[2]] = given[3]
            color.setdefault(given[2], given[1])
        elif held := re.fullmatch(r"The (\w+) (\w+) is with (\w+)\.", sentence):
            color[held[2]], owner[held[2]] = held[1], held[3]
        elif moved := re.fullmatch(r"(\w+) goes to the (\w+)\.", sentence):
            place[moved[1]] = moved[2]
        else:
            raise AssertionError(f"sentence the checker does not know: {sentence}")
    asked = re.findall(r"\w+", question)[-1]
    return {"Who": owner, "What": color, "Where": place}[question.split()[0]][asked]


SOLVERS = {
    "add": solve_add,
    "sort": solve_sort,
    "lookup": solve_lookup,
    "bracket": solve_bracket,
    "story": solve_story,
}


def test_every_task_has_an_independent_solver() -> None:
    assert set(SOLVERS) == set(tasks.SAMPLERS)


@pytest.mark.parametrize("task", list(SOLVERS))
def test_answers_agree_with_an_independent_solver(task: str) -> None:
    rng = random.Random(7)
    for _ in range(2000):
        instance = tasks.SAMPLERS[task](rng)
        assert SOLVERS[task](instance.prompt) == instance.answer, instance


def test_further_questions_about_a_story_have_right_answers() -> None:
    rng = random.Random(8)
    for _ in range(500):
        first, more = tasks.sample_story_turns(rng)
        text = first.prompt[: first.prompt.rindex(". ") + 2]
        assert all(solve_story(text + question) == answer for question, answer in more)


def test_a_seed_decides_the_instances() -> None:
    assert tasks.draw_set(3, "test", 40) == tasks.draw_set(3, "test", 40)
    assert tasks.draw_set(3, "test", 40) != tasks.draw_set(4, "test", 40)


def test_sets_hold_the_number_asked_for_and_no_content_twice() -> None:
    instances = tasks.draw_set(5, "dev", 60)
    assert len(instances) == 60 * len(tasks.SAMPLERS) == len({instance.key for instance in instances})


@pytest.mark.parametrize("task", list(SOLVERS))
def test_training_never_draws_held_out_content(task: str) -> None:
    rng = random.Random(9)
    training = {tasks.draw(task, rng, "train").key for _ in range(3000)}
    held_out = {instance.key for instance in tasks.draw_set(1, "test", 60) if instance.task == task}
    assert not training & held_out


def test_wording_and_order_do_not_change_the_split() -> None:
    rng = random.Random(10)
    seen: dict[frozenset[str], set[str]] = {}
    for _ in range(5000):
        instance = tasks.sample_add(rng)
        seen.setdefault(frozenset(re.findall(r"\d+", instance.prompt)), set()).add(
            tasks.split_of(instance.key)
        )
    assert all(len(splits) == 1 for splits in seen.values())


def test_splits_have_their_share() -> None:
    splits = [tasks.split_of(f"content {n}") for n in range(16000)]
    assert 850 < splits.count("test") < 1150
    assert 850 < splits.count("dev") < 1150


@pytest.mark.parametrize(
    ("text", "still_open"), [("", ""), ("([", "(["), ("()[", "["), ("(]", None), (")", None)]
)
def test_open_brackets(text: str, still_open: str | None) -> None:
    assert tasks.open_brackets(text) == still_open


def test_tales_name_their_hero_and_end() -> None:
    story = tasks.tale(random.Random(11), "Mia", "ball", "red")
    assert "Mia" in story
    assert "red ball" in story
    assert story.endswith("The end.")
