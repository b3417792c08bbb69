"""One choice of one response: engine outputs in, text and log probabilities out. No I/O."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from hotrack.core.errors import HotrackError, ModelAsleepError, error_from_code
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, TokenLogprobs, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.server.detokenizer import TokenDecoder
from hotrack.server.stopping import StopMatcher


@dataclass(slots=True)
class Delta:
    """What a client may see since the last delta that was not empty.

    ``token_ids``: all tokens since then. ``token_logprobs``: one for each of them, when asked for.
    """

    text: str
    token_ids: list[int]
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def empty(self) -> bool:
        return not self.text and not self.token_logprobs and self.finish_reason is None


class SequenceState:
    """Detokenizes, applies stop strings and counts.

    ``stopped_here``: a stop string matched, so the engine must be told to stop this sequence.
    """

    def __init__(self, decoder: TokenDecoder, sampling: SamplingParams, *, context: Seq[int] = ()) -> None:
        self._detokenizer = decoder.new(skip_special_tokens=sampling.skip_special_tokens, context=context)
        self._stops = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._include_stop = sampling.include_stop_str_in_output
        self._unshown: list[int] = []
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.finished = False
        self.stopped_here = False

    def feed(self, output: EngineOutput) -> Delta:
        """Raises the typed error that ended the sequence when it did not end by stop or length."""
        if self.finished:
            return Delta("", [])
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.finished = True
            raise _ended_early(output)
        tokens = unpack_tokens(output.tokens).tolist()
        delta = Delta("", tokens, list(output.logprobs or ()))
        delta.text = self._read(tokens, output.stop_token_id)
        del delta.token_logprobs[len(tokens) :]
        if self._stops.matched is not None:
            self._finish(delta, FinishReason.STOP, self._stops.matched)
            self.stopped_here = output.finish_reason is None
        elif output.finish_reason is not None:
            delta.text += self._flush()
            if self._stops.matched is not None:
                self._finish(delta, FinishReason.STOP, self._stops.matched)
            else:
                # vLLM's word: an end-of-sequence token is no "reason", a requested stop token is.
                asked = output.stop_token_id in self._stop_token_ids
                self._finish(delta, output.finish_reason, output.stop_token_id if asked else None)
        self._unshown += tokens
        if not delta.empty:
            delta.token_ids, self._unshown = self._unshown, []
        return delta

    def _read(self, tokens: list[int], stop_token_id: int | None) -> str:
        """Text of the new tokens as far as it is certain; drops what comes after a stop string from
        ``tokens``."""
        shown = ""
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            last = position == len(tokens) - 1
            if last and token == stop_token_id and not self._include_stop:
                break  # the token that ends a sequence counts, but is not part of its text
            text = self._detokenizer.push(token)
            shown += self._stops.push(text, armed=self.num_tokens > self._min_tokens)
            if self._stops.matched is not None:
                del tokens[position + 1 :]
                break
        return shown

    def _flush(self) -> str:
        return self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    def _finish(self, delta: Delta, reason: FinishReason, stop: int | str | None) -> None:
        self.finished = True
        delta.finish_reason, delta.stop_reason = reason, stop


def _ended_early(output: EngineOutput) -> HotrackError:
    if output.finish_reason is FinishReason.ABORT:
        return ModelAsleepError(
            output.error or "the request was aborted because the model went to sleep; send it again"
        )
    return error_from_code(
        output.error_code or HotrackError.code, output.error or "the engine could not finish this request"
    )
