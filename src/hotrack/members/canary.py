"""Does a member still give the answers it gave before it slept? Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """Greedy continuation of one prompt. ``tokens``: token texts (empty when the engine gives no
    logprobs).
    """

    text: str
    tokens: tuple[str, ...] = ()
    first_logprob: float | None = None


def mismatch(
    baseline: Sequence[CanaryAnswer], answers: Sequence[CanaryAnswer], *, logprob_tolerance: float
) -> str:
    """Empty when the answers agree, else one line of evidence about the first that does not.

    Text and token texts must be equal; the first token's logprob may differ by ``logprob_tolerance``. A
    logprob that is not a number agrees with nothing.
    """
    assert len(baseline) == len(answers), f"{len(baseline)=} {len(answers)=}"
    for index, (want, got) in enumerate(zip(baseline, answers, strict=True)):
        if (want.text, want.tokens) != (got.text, got.tokens):
            return f"prompt {index}: expected {want.text!r}, got {got.text!r}"
        if want.first_logprob is None or got.first_logprob is None:
            continue
        if not abs(want.first_logprob - got.first_logprob) <= logprob_tolerance:
            return (
                f"prompt {index}: same text {got.text!r} but the first token's logprob went from "
                f"{want.first_logprob:.4f} to {got.first_logprob:.4f} (tolerance {logprob_tolerance:g})"
            )
    return ""
