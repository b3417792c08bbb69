"""A tiny real process that speaks vLLM's sleep dialect over a Unix socket or a port. No model inside.

``python fake_engine_server.py --uds PATH | --port N [--megabytes N] [--ignore-sigterm] [--bare] [--fail
NAME] [--word N]``

Awake it holds ``--megabytes`` of touched memory and gives them back to the system on sleep, so a memory
probe sees the truth. ``--word``: MiB that its reports claim to be on its device. ``--bare``: empty bodies, as
older engines answer. ``--fail``: that call answers 500. A prompt of ``die`` kills it, ``fork`` leaves a child
process behind.
"""

import argparse
import asyncio
import mmap
import os
import signal
import sys

from aiohttp import web

MIB = 1 << 20


class Engine:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.memory: list[mmap.mmap] = []  # one MiB each
        self.take()

    def take(self) -> None:
        while len(self.memory) < self.options.megabytes:
            block = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for offset in range(0, MIB, mmap.PAGESIZE):
                block[offset] = 1
            self.memory.append(block)
        self.sleeping = False

    def drop(self, nbytes: int) -> None:
        for _ in range(min(len(self.memory), -(-nbytes // MIB))):
            self.memory.pop().close()
        self.sleeping = True

    def reply(self, name: str, body: dict[str, object]) -> web.Response:
        if self.options.fail == name:
            return web.json_response({"error": {"message": f"Call to {name} method failed"}}, status=500)
        return web.Response(status=204) if self.options.bare else web.json_response(body)

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self.sleeping})

    async def sleep(self, request: web.Request) -> web.Response:
        level, mode = request.query["level"], request.query["mode"]
        assert mode in ("abort", "wait", "keep"), mode
        if "nbytes" in request.query:
            print("sleep", request.query["nbytes"], flush=True)
        self.drop(int(request.query.get("nbytes", len(self.memory) * MIB)))
        return self.reply("sleep", {"status": "sleeping", "level": int(level), **self.report()})

    def report(self) -> dict[str, object]:
        return {"report": {"device_after_bytes": self.options.word * MIB}} if self.options.word else {}

    async def wake_up(self, request: web.Request) -> web.Response:
        streamed = ["streamed"] if request.query.get("streamed") == "true" else []
        print("wake_up", *request.query.getall("tags", []), *streamed, flush=True)
        self.take()
        tags = request.query.getall("tags", [])
        return self.reply("wake_up", {"status": "awake", "tags": tags, **self.report()})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        print((await request.json())["method"], flush=True)
        return web.Response()

    async def reset(self, request: web.Request) -> web.Response:
        print("reset_prefix_cache", flush=True)
        return web.json_response({"success": self.options.fail != "reset"})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["prompt"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if body["prompt"] == "hang":
            await asyncio.Event().wait()
        if body["prompt"] == "fork":
            code = "import time; time.sleep(600)"
            child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
            return web.json_response({"choices": [{"text": str(child.pid)}]})
        logprobs = {"tokens": [" Paris", "."], "token_logprobs": [-0.25, -1.0]}
        return web.json_response({"choices": [{"text": " Paris.", "logprobs": logprobs}]})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int)
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--fail", default="")
    parser.add_argument("--word", type=int, default=0)
    options = parser.parse_args()
    engine = Engine(options)
    app = web.Application()
    app.router.add_get("/health", engine.health)
    app.router.add_get("/is_sleeping", engine.is_sleeping)
    app.router.add_post("/sleep", engine.sleep)
    app.router.add_post("/wake_up", engine.wake_up)
    if not options.bare:
        app.router.add_post("/reset_prefix_cache", engine.reset)
    app.router.add_post("/collective_rpc", engine.collective_rpc)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.completions)
    print("fake engine is up", flush=True)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: print("ignoring SIGTERM", flush=True))
    web.run_app(
        app,
        path=options.uds,
        host="127.0.0.1" if options.port else None,
        port=options.port,
        print=None,
        handle_signals=not options.ignore_sigterm,
    )


if __name__ == "__main__":
    main()
