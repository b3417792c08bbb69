"""The soak's judgement, on a server that misbehaves on purpose."""

import asyncio
import json
from collections.abc import Callable

import pytest
from aiohttp import web

from hotrack.bench.client import BenchError
from hotrack.bench.soak import GROWTH_BYTES, Soak, SoakOptions, SoakReport


def options(**changes: object) -> SoakOptions:
    values: dict[str, object] = {
        "models": ["m"], "prompts": ["q"], "seconds": 0.4, "clients": 2, "kill_every_s": 0.0, "limit_s": 5.0,
    }  # fmt: skip
    return SoakOptions(**{**values, **changes})  # type: ignore[arg-type]


class Server:
    """``fault``: from the second request on; ``asleep``: bytes of a sleeper per look."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.requests = 0
        self.asleep = 100 << 20

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body = await request.json()
        fault = self.fault if self.requests > 1 else ""
        error = {"error": {"code": "wake_failed", "message": "later"}}
        if fault == "refuse":
            return web.json_response(error, status=503)
        text = "wrong" if fault == "wrong" else "right"
        if not body["stream"]:
            return web.json_response({"choices": [{"message": {"content": text}}]})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b": waiting\n\n")
        for piece in (text[:2], text[2:]):
            await reply.write(
                b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}).encode() + b"\n\n"
            )
            if fault == "cut":
                return reply
            if fault == "error event":
                await reply.write(b"data: " + json.dumps(error).encode() + b"\n\n")
                return reply
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def members(self, _: web.Request) -> web.Response:
        return web.json_response({"members": [{"name": "m", "state": "asleep", "memory_bytes": self.asleep}]})

    async def swaps(self, _: web.Request) -> web.Response:
        return web.json_response({"swaps": [{"number": 1, "time": 5.0}, {"number": 2, "time": 6.0}]})


def play(server: Server, kill: Callable[[], bool] = lambda: False, **changes: object) -> SoakReport:
    async def scenario() -> SoakReport:
        app = web.Application()
        app.add_routes([
            web.post("/v1/chat/completions", server.chat), web.get("/api/pool/members", server.members),
            web.get("/api/pool/swaps", server.swaps),
        ])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        soak = Soak(f"http://127.0.0.1:{port}", options(**changes), kill=kill, down=lambda: False)
        try:
            return await soak.run(lambda *_: None)
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def test_a_pool_that_keeps_its_promises() -> None:
    kills = iter([True, False, True, True, True, True, True, True])
    report = play(Server(), kill=lambda: next(kills), kill_every_s=0.05)
    assert set(report.endings) == {"ok"}
    assert report.swaps == 2
    assert report.kills >= 1
    assert all(report.invariants(5.0).values())


@pytest.mark.parametrize(
    ("fault", "ending", "broken"),
    [
        ("wrong", "wrong tokens", "no wrong token"),
        ("cut", "cut silently", "no stream cut silently"),
        ("refuse", "wake_failed", "somebody was served"),
        ("error event", "wake_failed", None),
    ],
)
def test_what_is_no_ending_is_found(fault: str, ending: str, broken: str | None) -> None:
    report = play(Server(fault), seconds=0.6)
    assert report.endings[ending] > 0
    held = report.invariants(5.0)
    assert broken is None or not held[broken]
    assert broken is not None or all(held.values())
    assert bool(report.evidence) == (fault in ("wrong", "cut"))


def test_a_member_that_is_broken_from_the_start_is_no_soak() -> None:
    class Broken(Server):
        async def chat(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"error": {"code": "model_not_found", "message": "no"}}, status=404)

    with pytest.raises(BenchError, match="m did not answer 'q' at the start: model_not_found no"):
        play(Broken())


def test_growth_is_that_of_settled_residues() -> None:
    report = SoakReport()
    report.residues["late"] = [100, *[200 << 20] * 99]  # libraries load, then nothing
    assert report.growth_bytes() == 0
    report.residues["leak"] = [(i << 20) for i in range(100)]
    assert report.growth_bytes() == pytest.approx(50 << 20, rel=0.1)
    assert report.growth_bytes() > GROWTH_BYTES
    assert not report.invariants(5.0)["residues flat"]
    report.left_processes = 1
    assert not report.invariants(5.0)["no process left"]
