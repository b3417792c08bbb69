"""Tasks with checkable answers for hotrack-tiny-moe: additions, sorting, look-up, brackets and small stories.

Nothing here needs torch. Every instance is a pure function of a ``random.Random`` and carries a *key* that
names its content whatever the wording (``add:123:456`` stands for ``123+456`` and for ``add 456 123``). The
key's hash decides the split, so a held-out instance never appears in training, not even reworded or with
its operands or list items in another order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "dev", "test"]

SPLIT_BUCKETS = 16
"""Bucket 0 is the test split, bucket 1 the development split, the other 14 are for training."""

WORDS = [
    "ant", "apple", "ash", "bean", "bear", "bell", "cake", "cat", "cup", "date", "dog", "duck", "egg",
    "elm", "fig", "fish", "fox", "gate", "goat", "hat", "hen", "ink", "jam", "kite", "lamp", "leaf",
    "lime", "milk", "moon", "nut", "oak", "owl", "pear", "pig", "pine", "rain", "rose", "sand", "seed",
    "star", "tea", "tree", "vine", "wolf", "yak",
]  # fmt: skip
NAMES = {
    "Tom": "he", "Mia": "she", "Sam": "he", "Ann": "she", "Ben": "he", "Eva": "she",
    "Leo": "he", "Zoe": "she", "Max": "he", "Ivy": "she", "Dan": "he", "Lily": "she",
}  # fmt: skip
GIVERS = ("Mom", "Dad")
OBJECTS = (
    "ball",
    "book",
    "cup",
    "hat",
    "kite",
    "drum",
    "lamp",
    "map",
    "coin",
    "bag",
    "ring",
    "pen",
    "box",
    "doll",
)
COLORS = ("red", "blue", "green", "black", "white", "pink")
PLACES = ("park", "kitchen", "garden", "school", "shop", "forest", "library", "barn")
PAIRS = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, slots=True)
class Instance:
    """One question: the user's prompt, the only right answer, and the key that names its content."""

    task: str
    prompt: str
    answer: str
    key: str


def split_of(key: str) -> Split:
    """Name the split that content belongs to, by hash."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    bucket = int.from_bytes(digest, "little") % SPLIT_BUCKETS
    return "test" if bucket == 0 else "dev" if bucket == 1 else "train"


def _number(rng: random.Random) -> int:
    """Draw 0..999; most have three digits."""
    digits = rng.choice((1, 2, 2, 3, 3, 3))
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def sample_add(rng: random.Random) -> Instance:
    """``add 123 456`` -> ``579``."""
    a, b = _number(rng), _number(rng)
    form = rng.choice(
        (
            "add {} {}",
            "Add {} and {}.",
            "What is {}+{}?",
            "What is {} + {}?",
            "{}+{}",
            "{} + {} =",
            "{}+{}=",
            "How much is {} plus {}?",
        )
    )
    return Instance("add", form.format(a, b), str(a + b), f"add:{min(a, b)}:{max(a, b)}")


def sample_sort(rng: random.Random) -> Instance:
    """``sort 5 2 9`` -> ``2 5 9``; also letters and words."""
    kind = rng.choice(("digits", "letters", "words"))
    if kind == "digits":
        items = [str(rng.randrange(10)) for _ in range(rng.randint(2, 6))]
    elif kind == "letters":
        items = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(2, 6))
    else:
        items = rng.sample(WORDS, rng.randint(2, 4))
    form, separator = rng.choice(
        (
            ("sort {}", " "),
            ("Sort {}.", " "),
            ("sort: {}", " "),
            ("Put in order: {}", " "),
            ("Sort these: {}", ", "),
        )
    )
    ordered = sorted(items)
    return Instance(
        "sort", form.format(separator.join(items)), " ".join(ordered), "sort:" + ",".join(ordered)
    )


LETTER_FORMS = (
    ("=", " ", "{}; {}?"),
    ("=", ", ", "Given {}, what is {}?"),
    ("=", ", ", "{}. What is {}?"),
    (" is ", ", ", "{}. What is {}?"),
    (": ", ", ", "{}. Value of {}?"),
)
PEOPLE_FORMS = (
    ("=", ", ", "{}; {}?"),
    (": ", ", ", "{}. Who has the {}?"),
    (" is with ", ", ", "{}. Who has the {}?"),
    (" goes to ", ", ", "{}. Who has the {}?"),
)


def sample_lookup(rng: random.Random) -> Instance:
    """``a=3 b=7 c=1; b?`` -> ``7``; from letters, words or things to numbers, words or people."""
    count = rng.randint(2, 7)
    kind = rng.choice(("letters", "letters", "words", "people"))
    if kind == "people":
        keys, values = rng.sample(OBJECTS, count), [rng.choice(list(NAMES)) for _ in range(count)]
    else:
        keys = rng.sample(WORDS if kind == "words" else "abcdefghijklmnopqrstuvwxyz", count)
        numbers = kind == "words" or rng.random() < 0.7
        values = [str(rng.randrange(100)) if numbers else rng.choice(WORDS) for _ in keys]
    asked = rng.randrange(count)
    separator, joiner, form = rng.choice(PEOPLE_FORMS if kind == "people" else LETTER_FORMS)
    text = joiner.join(f"{k}{separator}{v}" for k, v in zip(keys, values, strict=True))
    content = ",".join(sorted(f"{k}={v}" for k, v in zip(keys, values, strict=True)))
    return Instance("lookup", form.format(text, keys[asked]), values[asked], f"lookup:{content}")


def open_brackets(text: str) -> str | None:
    """Return the brackets still open after ``text``, innermost last; None if a closing one does not match."""
    stack: list[str] = []
    for char in text:
        if char in PAIRS:
            stack.append(char)
        elif not stack or PAIRS[stack.pop()] != char:
            return None
    return "".join(stack)


def _balanced(rng: random.Random, pairs: int) -> str:
    """Draw a balanced string of ``pairs`` pairs, at most four deep."""
    text, stack = "", ""
    opened = 0
    while opened < pairs or stack:
        may_open = opened < pairs and len(stack) < 4
        if may_open and (not stack or rng.random() < 0.5):
            stack += rng.choice("([{")
            text += stack[-1]
            opened += 1
        else:
            text += PAIRS[stack[-1]]
            stack = stack[:-1]
    return text


def _spoiled(rng: random.Random, text: str) -> str:
    """Change one or two characters of a balanced string until it is no longer balanced."""
    while True:
        chars = list(text)
        where = rng.randrange(len(chars))
        if rng.random() < 0.6:
            chars[where] = rng.choice("()[]{}")
        else:
            other = rng.randrange(len(chars))
            chars[where], chars[other] = chars[other], chars[where]
        if open_brackets("".join(chars)) != "":
            return "".join(chars)


def sample_bracket(rng: random.Random) -> Instance:
    """``Is ([]) balanced?`` -> ``yes``, ``close ([{`` -> ``}])``."""
    text = _balanced(rng, rng.choice((1, 2, 3, 3, 4, 4, 5, 5)))
    if rng.random() < 0.5:
        if rng.random() < 0.5:
            text = _spoiled(rng, text)
        form = rng.choice(("Is {} balanced?", "balanced? {}", "Are the brackets in {} balanced?"))
        answer = "yes" if open_brackets(text) == "" else "no"
        return Instance("bracket", form.format(text), answer, f"balanced:{text}")
    prefix = text[: rng.choice([end for end in range(1, len(text)) if open_brackets(text[:end])])]
    answer = "".join(PAIRS[char] for char in reversed(open_brackets(prefix) or ""))
    form = rng.choice(("close {}", "Close the brackets: {}", "complete {}"))
    return Instance("bracket", form.format(prefix), answer, f"close:{prefix}")


def sample_story_turns(rng: random.Random) -> tuple[Instance, list[tuple[str, str]]]:
    """Draw a story with a question, and a few further (question, answer) turns about the same story.

    The story is two to six sentences about who was given what and who went where.
    """
    people = rng.sample(list(NAMES), rng.randint(2, 4))
    things = rng.sample(OBJECTS, len(people))
    colors = {thing: rng.choice(COLORS) for thing in things}
    owner = dict(zip(things, people, strict=True))
    where: dict[str, str] = {}
    lines = [
        f"{rng.choice(GIVERS)} gives a {colors[t]} {t} to {owner[t]}."
        if rng.random() < 0.7
        else f"The {colors[t]} {t} is with {owner[t]}."
        for t in things
    ]
    for _ in range(rng.randint(0, 2)):
        if rng.random() < 0.6:
            thing = rng.choice(things)
            giver = owner[thing]
            owner[thing] = rng.choice([p for p in people if p != giver])
            lines.append(f"{giver} gives the {thing} to {owner[thing]}.")
        else:
            person = rng.choice(people)
            where[person] = rng.choice([p for p in PLACES if p != where.get(person)])
            lines.append(f"{person} goes to the {where[person]}.")
    (question, answer), *more = (_story_question(rng, owner, colors, where) for _ in range(rng.randint(2, 4)))
    text = " ".join(lines)
    return Instance("story", f"{text} {question}", answer, f"story:{text}"), more


def _story_question(
    rng: random.Random, owner: dict[str, str], colors: dict[str, str], where: dict[str, str]
) -> tuple[str, str]:
    """Draw a question about the final state that has exactly one answer."""
    kind = rng.choice(("who", "who", "color", "where"))
    if kind == "where" and where:
        person = rng.choice(sorted(where))
        return f"Where is {person}?", where[person]
    thing = rng.choice(list(owner))
    if kind == "color":
        return f"What color is the {thing}?", colors[thing]
    return rng.choice(("Who has the {t}?", "Who has the {c} {t}?")).format(t=thing, c=colors[thing]), owner[
        thing
    ]


def sample_story(rng: random.Random) -> Instance:
    """``Mom gives a red ball to Tom. Tom gives the ball to Mia. Who has the ball?`` -> ``Mia``."""
    return sample_story_turns(rng)[0]


SAMPLERS: dict[str, Callable[[random.Random], Instance]] = {
    "add": sample_add,
    "sort": sample_sort,
    "lookup": sample_lookup,
    "bracket": sample_bracket,
    "story": sample_story,
}


def draw(task: str, rng: random.Random, split: Split) -> Instance:
    """Draw an instance of ``task`` from ``split``."""
    while True:
        instance = SAMPLERS[task](rng)
        if split_of(instance.key) == split:
            return instance


def draw_set(seed: int, split: Split, per_task: int) -> list[Instance]:
    """Draw ``per_task`` instances of each task from ``split``, no content twice."""
    found: list[Instance] = []
    for task in SAMPLERS:
        rng = random.Random(f"{seed}/{split}/{task}")
        unique: dict[str, Instance] = {}
        while len(unique) < per_task:
            instance = draw(task, rng, split)
            unique.setdefault(instance.key, instance)
        found += unique.values()
    return found


def tale(rng: random.Random, hero: str, thing: str, color: str) -> str:
    """Tell a short story in plain words, about 200 characters; its facts do not contradict each other."""
    friend = rng.choice([name for name in NAMES if name != hero])
    he = NAMES[hero]
    home, place = rng.sample(PLACES, 2)
    kind = "boy" if he == "he" else "girl"
    lines = [
        rng.choice(
            (
                f"Once upon a time there was a {kind} named {hero}.",
                f"{hero} was a little {kind}.",
                f"There was a {kind} named {hero}.",
            )
        ),
        rng.choice((f"One day {he} went to the {place}.", f"One day {hero} walked to the {place}.")),
        f"{he.capitalize()} found a {color} {thing} in the {place}.",
        rng.choice(
            (f"{hero} was very happy.", f"{hero} liked the {thing} a lot.", f"It was a very nice {thing}.")
        ),
    ]
    ending = rng.randrange(3)
    if ending == 0:
        lines += [
            f"Then {friend} came.",
            f"{hero} gave the {thing} to {friend}.",
            f"{friend} said thank you.",
        ]
    elif ending == 1:
        lines += [f"{hero} took the {thing} to the {home}.", f"Now the {thing} is in the {home}."]
    else:
        lines += [f"{hero} and {friend} played with the {color} {thing}.", "They played all day."]
    return " ".join([*lines, "The end."])


def sample_tale(rng: random.Random) -> tuple[str, str]:
    """Draw a request for a story and the story (many are right, so it is trained but not scored)."""
    hero, thing, color = rng.choice(list(NAMES)), rng.choice(OBJECTS), rng.choice(COLORS)
    form = rng.choice(
        (
            "Tell me a story about {h} and a {c} {t}.",
            "Tell a story about {h} and a {c} {t}.",
            "Tell me a story.",
            "story",
        )
    )
    return form.format(h=hero, c=color, t=thing), tale(rng, hero, thing, color)


GREETING = "Hello! I can add, sort, look up, match brackets and read stories."
ABOUT = "I am hotrack-tiny-moe, a small mixture of experts."
SMALL_TALK: dict[str, Sequence[str]] = {
    GREETING: ("hi", "hello", "Hello!", "Hi!", "hey", "Hi there", "help", "What can you do?", "Help me"),
    ABOUT: ("Who are you?", "who are you", "What are you?", "What is your name?"),
    "You are welcome.": ("thanks", "thank you", "Thanks!", "Thank you!"),
    "Goodbye!": ("bye", "Goodbye", "goodbye", "Bye!"),
    "ok": ("ping", "Say ok.", "Reply with ok.", "Say ok"),
}


def sample_talk(rng: random.Random) -> tuple[str, str]:
    """Draw a greeting or a question about the model, and its fixed reply."""
    reply = rng.choice(list(SMALL_TALK))
    return rng.choice(SMALL_TALK[reply]), reply
