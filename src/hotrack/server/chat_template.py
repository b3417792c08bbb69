"""Messages to prompt text through the model's chat template, with a deadline."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hotrack.config.env import child_environment
from hotrack.core.child import bound_to_parent
from hotrack.core.errors import RequestError
from hotrack.openai.requests import ChatMessage
from hotrack.server.template_wire import RenderJob, RenderResult, frame

MAX_TEMPLATE_CHARS = 1 << 20
_RESERVED = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools", "documents"})


class ChatTemplate:
    """One model's template and the process that renders it (see ``template_worker``); one render at a time.

    ``special_tokens``: variables every Hugging Face template may use, such as ``bos_token``.
    ``timeout_s``: a render that takes longer is killed, and the process replaced.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], *, timeout_s: float) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._timeout_s = timeout_s
        self._worker: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the worker early, so that the first request need not wait for it."""
        if self._source is not None:
            async with self._turn:
                self._worker = await self._spawn()

    async def close(self) -> None:
        async with self._turn:
            await self._kill()

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text.

        ``kwargs``: the client's ``chat_template_kwargs``. ``continue_final_message``: the prompt ends inside
        the last message.

        Raises:
            RequestError: no template, contradictory options, content that is not text, or the template
            refused or failed.
        """
        source = self._check(add_generation_prompt, continue_final_message, messages, kwargs or {})
        turns = [_as_dict(message, index) for index, message in enumerate(messages)]
        variables = {
            **self._special_tokens,
            **(kwargs or {}),
            "messages": turns,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = await self._run(RenderJob(source, variables))
        return _cut_after(text, str(turns[-1]["content"])) if continue_final_message else text

    def _check(
        self, add: bool, proceed: bool, messages: Sequence[ChatMessage], kwargs: Mapping[str, Any]
    ) -> str:
        if self._source is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                code="no_chat_template",
                param="messages",
            )
        if len(self._source) > MAX_TEMPLATE_CHARS:
            raise RequestError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        if add and proceed:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict each other; set "
                "add_generation_prompt to false",
                param="continue_final_message",
            )
        if clash := sorted(kwargs.keys() & _RESERVED):
            raise RequestError(
                f"chat_template_kwargs must not set {', '.join(clash)}", param="chat_template_kwargs"
            )
        return self._source

    async def _run(self, job: RenderJob) -> str:
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await self._exchange(frame(msgspec.json.encode(job)))
            except BaseException as error:
                await self._kill()  # whatever happened, the pipe may hold half an answer
                if isinstance(error, TimeoutError):
                    result = RenderResult(error=f"it did not finish within {self._timeout_s:g} s")
                elif isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                    result = RenderResult(error="its process ended, most likely for want of memory")
                else:
                    raise
        if result.text is None:
            raise RequestError(
                f"the chat template could not render these messages: {result.error}",
                code="chat_template_error",
                param="messages",
            )
        return result.text

    async def _exchange(self, request: bytes) -> RenderResult:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await self._spawn()
        stdin, stdout = self._worker.stdin, self._worker.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(request)
        await stdin.drain()
        size = int.from_bytes(await stdout.readexactly(4), "little")
        return msgspec.json.decode(await stdout.readexactly(size), type=RenderResult)

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hotrack.server.template_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=child_environment({"HOTRACK_API_KEY": ""}), preexec_fn=bound_to_parent(),
        )  # fmt: skip

    async def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()


def _as_dict(message: ChatMessage, index: int) -> dict[str, Any]:
    """What templates see: a plain dict whose content is one string; absent fields stay absent."""
    turn = {name: value for name, value in msgspec.structs.asdict(message).items() if value is not None}
    turn["content"] = _text_content(message, index)
    return turn


def _text_content(message: ChatMessage, index: int) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for part_index, part in enumerate(message.content):
        if part.type not in ("text", "input_text", "output_text", "refusal") or part.text is None:
            raise RequestError(
                f"messages[{index}].content[{part_index}] has type {part.type!r}; this model takes text "
                "parts only",
                code="unsupported_content",
                param=f"messages[{index}].content[{part_index}]",
            )
    return "\n".join(part.text for part in message.content if part.text is not None)


def _cut_after(text: str, final: str) -> str:
    """``text`` up to the end of the last message, dropping what the template put behind it."""
    at = text.rfind(final.strip())
    if at < 0:
        raise RequestError(
            "continue_final_message: the template does not show the last message as written",
            param="continue_final_message",
        )
    end = at + len(final)
    return text[:end] if text[at:end] == final else text[: at + len(final.strip())]
