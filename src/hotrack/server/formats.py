"""Response bodies of chat and text completions, whole and in chunks.

A chunk differs from the one before in its text and little else, so everything else is encoded once per
choice.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import TokenLogprobs
from hotrack.openai.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Usage,
    usage,
)
from hotrack.server.detokenizer import TokenDecoder
from hotrack.server.generation import Job
from hotrack.server.logprobs import CompletionLogprobsBuilder, chat_logprobs, concatenate, prompt_logprobs
from hotrack.server.sequence import Delta

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the client asked to see beside the text."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False


@dataclass(slots=True)
class Choice:
    """Everything one sequence produced, for a response that is not streamed."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.token_logprobs += delta.token_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


class Format(Protocol):
    """One response's encoder; ``jobs`` are its sequences, ``jobs[i].index == i``."""

    wanted: Wanted

    def opening(self) -> bytes:
        """Events that come before the first delta."""
        ...

    def event(self, index: int, delta: Delta) -> bytes: ...

    def closing(self) -> bytes:
        """Events after the last delta, without ``[DONE]``."""
        ...

    def whole(self, choices: Sequence[Choice]) -> bytes: ...


class _Base:
    def __init__(
        self,
        response_id: str,
        model: str,
        jobs: Sequence[Job],
        prompts: Sequence[list[int]],
        decoder: TokenDecoder,
        wanted: Wanted,
    ) -> None:
        self.id, self.model, self.jobs, self.prompts = response_id, model, jobs, prompts
        self.decoder, self.wanted = decoder, wanted
        self.created = int(time.time())
        self.per_prompt = len(jobs) // len(prompts)

    def usage(self) -> Usage:
        # Of several choices for one prompt, the first tells what was cached before this request.
        cached = sum(job.state.num_cached_tokens for job in self.jobs[:: self.per_prompt])
        return usage(sum(map(len, self.prompts)), sum(job.state.num_tokens for job in self.jobs), cached)

    def _head(self, object_name: str, index: int, key: bytes) -> bytes:
        head = _encode({"id": self.id, "object": object_name, "created": self.created, "model": self.model})
        return b"data: " + head[:-1] + b',"choices":[{"index":%d,' % index + key

    def _tail(self, delta: Delta, logprobs: bytes) -> bytes:
        """From behind the text to the end of the event."""
        tail = b',"logprobs":' + logprobs
        if delta.finish_reason is None:
            tail += b',"finish_reason":null'
        else:
            tail += b',"finish_reason":"%s","stop_reason":' % delta.finish_reason.value.encode()
            tail += _encode(delta.stop_reason)
        if self.wanted.token_ids:
            tail += b',"token_ids":' + _encode(delta.token_ids)
        return tail + b"}]" + self._running_usage() + b"}\n\n"

    def _running_usage(self) -> bytes:
        if self.wanted.continuous_usage:
            return b',"usage":' + _encode(self.usage())
        return b',"usage":null' if self.wanted.include_usage else b""

    def _usage_event(self, object_name: str) -> bytes:
        if not self.wanted.include_usage:
            return b""
        body = {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": [],
        }
        return b"data: " + _encode({**body, "usage": self.usage()}) + b"\n\n"

    def _prompt_logprobs(self, job: Job) -> Any:
        return (
            prompt_logprobs(job.state.prompt_logprobs, self.decoder) if self.wanted.prompt_logprobs else UNSET
        )


class ChatFormat(_Base):
    OBJECT = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads = [self._head(self.OBJECT, job.index, b'"delta":{"content":') for job in self.jobs]

    def opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        tail = b',"logprobs":null,"finish_reason":null}]' + self._running_usage() + b"}\n\n"
        return b"".join(self._head(self.OBJECT, job.index, delta) + tail for job in self.jobs)

    def event(self, index: int, delta: Delta) -> bytes:
        logprobs = b"null"
        if delta.token_logprobs:
            logprobs = _encode(chat_logprobs(delta.token_logprobs, self.decoder))
        return self._heads[index] + _encode(delta.text) + b"}" + self._tail(delta, logprobs)

    def closing(self) -> bytes:
        return self._usage_event(self.OBJECT)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return _encode(
            ChatCompletion(
                self.id,
                self.created,
                self.model,
                [self._choice(i, choice) for i, choice in enumerate(choices)],
                self.usage(),
                prompt_logprobs=self._prompt_logprobs(self.jobs[0]),
                prompt_token_ids=self.prompts[0] if self.wanted.token_ids else UNSET,
            )
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index,
            AssistantMessage("".join(choice.text)),
            chat_logprobs(choice.token_logprobs, self.decoder) if self.wanted.logprobs else None,
            choice.finish_reason.value,  # type: ignore[arg-type] # aborted sequences never get here
            choice.stop_reason,
            choice.token_ids if self.wanted.token_ids else UNSET,
        )


class CompletionFormat(_Base):
    OBJECT = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._heads = [self._head(self.OBJECT, job.index, b'"text":') for job in self.jobs]
        self._logprobs = [CompletionLogprobsBuilder(self.decoder) for _ in self.jobs]

    def opening(self) -> bytes:
        return b""

    def event(self, index: int, delta: Delta) -> bytes:
        return (
            self._heads[index] + _encode(delta.text) + self._tail(delta, self._delta_logprobs(index, delta))
        )

    def closing(self) -> bytes:
        return self._usage_event(self.OBJECT)

    def echo_events(self) -> bytes:
        """The prompts as first deltas of their choices (``echo``)."""
        return b"".join(self.event(job.index, Delta(self._prompt_text(job.index), [])) for job in self.jobs)

    def whole(self, choices: Sequence[Choice]) -> bytes:
        return _encode(
            Completion(
                self.id,
                self.created,
                self.model,
                [self._choice(i, choice) for i, choice in enumerate(choices)],
                self.usage(),
            )
        )

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        wanted, prompt = self.wanted, self.prompts[index // self.per_prompt]
        text = "".join(choice.text)
        logprobs = None
        if wanted.logprobs:
            builder = self._logprobs[index]
            before = (
                builder.build_prompt(prompt, self.jobs[index].state.prompt_logprobs or ())
                if wanted.echo
                else None
            )
            logprobs = builder.build(choice.token_logprobs)
            logprobs = concatenate(before, logprobs) if before is not None else logprobs
        return CompletionChoice(
            index,
            self._prompt_text(index) + text if wanted.echo else text,
            logprobs,
            choice.finish_reason.value,  # type: ignore[arg-type] # aborted sequences never get here
            choice.stop_reason,
            choice.token_ids if wanted.token_ids else UNSET,
            prompt if wanted.token_ids else UNSET,
            self._prompt_logprobs(self.jobs[index]),
        )

    def _delta_logprobs(self, index: int, delta: Delta) -> bytes:
        if not delta.token_logprobs:
            return b"null"
        return _encode(self._logprobs[index].build(delta.token_logprobs))

    def _prompt_text(self, index: int) -> str:
        detokenizer = self.decoder.new(skip_special_tokens=True)
        prompt = self.prompts[index // self.per_prompt]
        return "".join(map(detokenizer.push, prompt)) + detokenizer.finish()
