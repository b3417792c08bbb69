"""A member process in vLLM's dialect that holds real memory and no model:
``python -m fakes.stub_member (--port N | --uds PATH) --name m --mib 64``.

It answers with its own name and the prompt reversed, one word per chunk; ``delay_ms`` in a request is the
pause between chunks. ``/sleep`` unmaps its memory, ``/wake_up`` maps and touches it again.
"""

import argparse
import asyncio
import json
import mmap
from typing import Any

import uvicorn


class StubMember:
    def __init__(self, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self.memory: mmap.mmap | None = None
        self.num_aborted = 0
        self.wake()

    def wake(self) -> None:
        if self.memory is None:
            self.memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for page in range(0, self.num_bytes, mmap.PAGESIZE):
                self.memory[page] = 1

    def sleep(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None

    def words(self, body: dict[str, Any]) -> list[str]:
        messages = body.get("messages")
        prompt = messages[-1]["content"] if messages else body.get("prompt", "")
        words = [f"{self.name}: ", *(f"{word} " for word in reversed(str(prompt).split()))]
        return words[: body.get("max_tokens", 999)]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path.startswith("/v1/") and scope["method"] == "POST":
            await self.generate(json.loads(raw), path, receive, send)
        elif path == "/sleep":
            self.sleep()
            await answer(send, {"status": "sleeping", "level": 1})
        elif path == "/wake_up":
            self.wake()
            await answer(send, {"status": "awake", "tags": None})
        elif path == "/is_sleeping":
            await answer(send, {"is_sleeping": self.memory is None})
        elif path == "/health":
            await answer(send, {"num_aborted": self.num_aborted})
        else:
            await answer(send, {"error": "no such path"}, 404)

    async def generate(self, body: dict[str, Any], path: str, receive: Any, send: Any) -> None:
        assert self.memory is not None, "asked while asleep"
        try:
            words = self.words(body)
        except (LookupError, TypeError):
            await answer(send, {"error": {"message": "not what I understand"}}, 400)
            return
        delay_s = body.get("delay_ms", 0) / 1000
        chat = path.endswith("/chat/completions")
        if not body.get("stream"):
            await asyncio.sleep(delay_s * len(words))
            text = "".join(words)
            choice: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            logprobs = {"tokens": words, "token_logprobs": [-0.5] * len(words)}
            choice |= {"index": 0, "logprobs": logprobs, "finish_reason": "stop"}
            await answer(send, {"choices": [choice]})
            return
        gone = asyncio.ensure_future(receive())
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for word in words:
            await asyncio.wait([gone], timeout=delay_s)
            if gone.done():
                self.num_aborted += 1
                return
            choice = {"delta": {"content": word}} if chat else {"text": word}
            event = b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
        gone.cancel()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def answer(send: Any, body: dict[str, Any], status: int = 200) -> None:
    head = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--name", default="m")
    parser.add_argument("--mib", type=int, default=64)
    options = parser.parse_args()
    print(f"stub member {options.name} holds {options.mib} MiB", flush=True)
    app = StubMember(options.name, options.mib << 20)
    uvicorn.run(
        app, host="127.0.0.1", port=options.port or 0, uds=options.uds, log_level="warning", lifespan="off"
    )


if __name__ == "__main__":
    main()
