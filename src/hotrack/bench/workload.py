"""Prompts for load tests: seeded, different for every request, of a wanted length in tokens."""

import random
from dataclasses import dataclass

# Frequent English words; most tokenizers give each one token, and `calibrate` measures the rest.
WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book eye "
    "job word business issue side kind head house service friend father power hour game line end "
    "member law car city community name president team minute idea kid body back parent"
)
WORDS = WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a sweep: ``concurrency`` streams of ``input_len`` prompt tokens and ``output_len`` output
    tokens."""

    input_len: int
    output_len: int
    concurrency: int
    repeats: int


class PromptMaker:
    """Makes prompts of about ``input_len`` tokens. No two share a first word sequence, so a prefix cache
    gains nothing."""

    def __init__(self, seed: int, tokens_per_word: float = 1.0, overhead_tokens: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._tokens_per_word = tokens_per_word
        self._overhead_tokens = overhead_tokens

    def words(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=max(1, count)))

    def prompt(self, input_len: int) -> str:
        return self.words(round((input_len - self._overhead_tokens) / self._tokens_per_word))


def calibrate(short: tuple[int, int], long: tuple[int, int]) -> tuple[float, float]:
    """(tokens per word, fixed overhead tokens) from two (words, prompt_tokens) measurements."""
    (short_words, short_tokens), (long_words, long_tokens) = short, long
    slope = (long_tokens - short_tokens) / (long_words - short_words)
    return slope, short_tokens - slope * short_words
