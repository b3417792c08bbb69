"""An engine that emits the tokens it was told to, one per turn of the loop; and a byte-level tokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hotrack.core.errors import EngineDeadError, HotrackError
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest, TokenLogprobs, pack_tokens, unpack_tokens

EOS = 0
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Special tokens 0..2, then one token per byte; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i + len(SPECIAL) for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab | {s: i for i, s in enumerate(SPECIAL)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL])
    return tokenizer


def say(text: str, *, then_eos: bool = True) -> Callable[[EngineRequest], list[int]]:
    """A script: the same text for every request."""
    ids = byte_tokenizer().encode(text, add_special_tokens=False).ids + ([EOS] if then_eos else [])
    return lambda request: ids


class ScriptedEngine:
    """``script(request)`` is what the model would say; max_tokens, EOS and stop tokens end it as usual.

    ``paused``: nothing is emitted until ``resume()``. ``refuse``: the next control raises this error.
    """

    def __init__(self, script: Callable[[EngineRequest], list[int]] | None = None) -> None:
        self.script = script or say("hello")
        self.stats: dict[str, float] = {}
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.refuse: HotrackError | None = None
        self.cached_tokens = 0
        self.sleeping: list[str] = []
        self.level: int | None = None
        self.report: dict[str, Any] = {}
        self._sinks: dict[str, Callable[[EngineOutput | HotrackError], None]] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def submit(self, request: EngineRequest, sink: Callable[[EngineOutput | HotrackError], None]) -> None:
        self.requests.append(request)
        self._sinks[request.request_id] = sink
        task = asyncio.get_running_loop().create_task(self._emit(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._sinks.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def die(self, message: str = "rank 0 was killed") -> EngineDeadError:
        error = EngineDeadError(message)
        for sink in self._sinks.values():
            sink(error)
        self._sinks.clear()
        return error

    async def control(self, op: str, **args: Any) -> dict[str, Any]:
        self.controls.append((op, args))
        await asyncio.sleep(0)
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        if op == "sleep":
            self.sleeping = ["weights", "kv_cache"]
            self.level = args["level"] if self.level is None else self.level
            if args["mode"] == "abort":
                for request_id, sink in self._sinks.items():
                    sink(EngineOutput(request_id, b"", finish_reason=FinishReason.ABORT))
                self._sinks.clear()
        if op == "wake":
            self.sleeping = [
                tag for tag in self.sleeping if args["tags"] is not None and tag not in args["tags"]
            ]
            if not self.sleeping:
                self.level = None
        return {"is_sleeping": bool(self.sleeping), "level": self.level, "freed_bytes": 1234, **self.report}

    async def _emit(self, request: EngineRequest) -> None:
        sampling = request.sampling
        prompt = None
        if sampling.prompt_logprobs is not None:
            tokens = unpack_tokens(request.prompt).tolist()
            prompt = tuple(_logprobs(token, sampling.prompt_logprobs) for token in tokens[1:])
        for position, token in enumerate(self.script(request), start=1):
            await asyncio.sleep(0)
            await self._running.wait()
            sink = self._sinks.get(request.request_id)
            if sink is None:
                return
            stops = token in sampling.stop_token_ids or (
                token in request.eos_token_ids and not sampling.ignore_eos
            )
            reason = (
                FinishReason.STOP
                if stops
                else FinishReason.LENGTH
                if position == request.max_tokens
                else None
            )
            if reason is not None:
                del self._sinks[request.request_id]
            sink(
                EngineOutput(
                    request.request_id,
                    pack_tokens([token]),
                    logprobs=None if sampling.logprobs is None else (_logprobs(token, sampling.logprobs),),
                    prompt_logprobs=prompt if position == 1 else None,
                    finish_reason=reason,
                    stop_token_id=token if stops else None,
                    num_cached_tokens=self.cached_tokens if position == 1 else 0,
                )
            )
            if reason is not None:
                return


def _logprobs(token: int, k: int) -> TokenLogprobs:
    top = [token + i for i in range(k)]
    return TokenLogprobs(pack_tokens([token, *top]), (-0.5, *(-0.5 - i for i in range(k))), 1)
