"""Offline API with vLLM's spelling: ``LLM(model).generate(prompts, SamplingParams(...))``."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Self

from hotrack.checkpoint.tokenizer import TokenizerAssets, load_tokenizer
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ContextLengthError, RequestError, error_from_code
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.backends import RanksBackend
from hotrack.engine.chat import render_chat
from hotrack.engine.in_process import Backend, InProcessBackend
from hotrack.engine.outputs import CompletionOutput, RequestOutput, as_logprobs, finish_name
from hotrack.hub.resolve import resolve

Prompt = str | Sequence[int]
Message = Mapping[str, str]


class LLM:
    """A model loaded in this process (``tensor_parallel_size`` 1) or in rank processes. Close it, or use
    ``with``.

    ``options`` are ``EngineConfig``'s fields. ``skip_tokenizer_init``: prompts are token ids, and results
    have no text. Not for use by several threads at once.

    Raises:
        CheckpointError: the model is missing, damaged or unsupported.
        ConfigError: an option is out of range.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **options: Any) -> None:
        self.config = EngineConfig(model=model, **options)
        self._assets = None if skip_tokenizer_init else load_tokenizer(resolve(model))
        self._backend: Backend = (
            InProcessBackend(self.config)
            if self.config.tensor_parallel_size == 1
            else RanksBackend(self.config)
        )
        self._request_ids = count()

    @property
    def assets(self) -> TokenizerAssets:
        """Raises RequestError without a tokenizer."""
        if self._assets is None:
            raise RequestError("this LLM was made without a tokenizer; give prompts as token ids")
        return self._assets

    @property
    def max_model_len(self) -> int:
        return int(self._backend.info["max_model_len"])

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt (text, or token ids); results in the order of ``prompts``.

        Raises:
            RequestError: a prompt or a parameter cannot be served; nothing is generated for the others
            either. ModelAsleepError: the model sleeps.
        """
        batch = _as_batch(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(batch)
        if len(sampling_params) != len(batch):
            raise ValueError(f"{len(batch)} prompts and {len(sampling_params)} sampling_params")
        results, requests = [], []
        for prompt, params in zip(batch, sampling_params, strict=True):
            result, parts = self._requests(prompt, params)
            results.append((result, params, parts))
            requests += parts
        outputs = self._backend.run(requests, StopStrings(requests, self._decode))
        for result, params, parts in results:
            for completion, part in zip(result.outputs, parts, strict=True):
                self._collect(result, completion, params, outputs[part.request_id])
        return [result for result, _, _ in results]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        Raises:
            RequestError: as ``generate``, and when the model has no template or it refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.assets.tokenizer.encode(
                render_chat(self.assets, conversation),  # type: ignore[arg-type]
                add_special_tokens=False,
            ).ids
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params)

    def sleep(self, level: int = 1, *, nbytes: int | None = None) -> dict[str, Any]:
        """Give device memory back; returns the report. ``level`` 1 keeps weights on the host, 2 drops
        them. ``nbytes`` (level 1): only about so much of each device, KV first.
        """
        return self._backend.control("sleep", level=level, nbytes=nbytes)

    def wake_up(self, tags: Iterable[str] | None = None, *, streamed: bool = False) -> dict[str, Any]:
        """Bring memory back (all, or 'weights' / 'kv_cache'); returns the report.

        ``streamed``: on a GPU, return while weights are still on their way, so that the next prompt is
        computed behind them, layer by layer. Its tokens come once all weights have been verified; if they
        are not what was saved, it fails, and the model is asleep.
        """
        wanted = None if tags is None else list(tags)
        return self._backend.control("wake", tags=wanted, streamed=streamed)

    def reset_prefix_cache(self) -> None:
        self._backend.control("reset_prefix_cache")

    def stats(self) -> dict[str, float]:
        return self._backend.control("stats")

    def close(self) -> None:
        """Free the device; ends rank processes."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _requests(self, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, list[EngineRequest]]:
        text = prompt if isinstance(prompt, str) else None
        ids = self.assets.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        room = self.max_model_len - len(ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; this model takes at most {self.max_model_len} for prompt "
                "and output together. Shorten the prompt.",
                param="prompt",
            )
        packed, name = pack_tokens(ids), str(next(self._request_ids))
        base = params.seed if params.seed is not None else secrets.randbits(62)
        parts = [
            EngineRequest(
                f"{name}-{index}",
                packed,
                # Siblings differ in their seed and are reproducible together.
                replace(params, n=1, seed=base + index),
                min(params.max_tokens or room, room),
                () if self._assets is None else self._assets.eos_token_ids,
            )
            for index in range(params.n)
        ]
        return RequestOutput(name, text, ids, [CompletionOutput(i) for i in range(params.n)]), parts

    def _collect(
        self,
        result: RequestOutput,
        completion: CompletionOutput,
        params: SamplingParams,
        outputs: list[EngineOutput],
    ) -> None:
        last = outputs[-1]
        if last.finish_reason is FinishReason.ERROR:
            raise error_from_code(last.error_code or "internal_error", last.error or "the request failed")
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        completion.token_ids = [token for output in outputs for token in unpack_tokens(output.tokens)]
        completion.logprobs = None if params.logprobs is None else [as_logprobs(entry) for entry in entries]
        completion.finish_reason = finish_name(last.finish_reason)
        completion.stop_reason = last.stop_token_id
        completion.text = self._decode(completion.token_ids, params)
        _cut_at_stop(completion, params)
        result.num_cached_tokens = outputs[0].num_cached_tokens
        if params.prompt_logprobs is not None:
            found = outputs[0].prompt_logprobs or ()
            result.prompt_logprobs = [None, *(as_logprobs(entry) for entry in found)]

    def _decode(self, token_ids: list[int], params: SamplingParams) -> str:
        if self._assets is None:
            return ""
        text: str = self._assets.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        return text


class StopStrings:
    """Watches requests with stop strings: True once the latest tokens complete one."""

    def __init__(
        self, requests: Sequence[EngineRequest], decode: Callable[[list[int], SamplingParams], str]
    ) -> None:
        self._watched = {r.request_id: (r.sampling, list[int]()) for r in requests if r.sampling.stop}
        self._decode = decode

    def __call__(self, output: EngineOutput) -> bool:
        if output.request_id not in self._watched or output.finish_reason is not None:
            return False
        params, tokens = self._watched[output.request_id]
        tokens += unpack_tokens(output.tokens)
        # A character may take up to four byte-level tokens; the rest of the window gives decoding its
        # context.
        window = 4 * max(map(len, params.stop)) + 8
        text = self._decode(tokens[-window:], params)
        return any(stop in text for stop in params.stop)


def _cut_at_stop(completion: CompletionOutput, params: SamplingParams) -> None:
    """End the text at the first stop string; token ids keep the tokens that spell it."""
    found = [(at, stop) for stop in params.stop if (at := completion.text.find(stop)) >= 0]
    if found:
        at, stop = min(found)
        completion.text = completion.text[: at + len(stop) * params.include_stop_str_in_output]
        completion.finish_reason, completion.stop_reason = str(FinishReason.STOP), stop


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
