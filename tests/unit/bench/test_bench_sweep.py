"""The sweep against a real HTTP server whose timing is known."""

import asyncio
import json

import pytest
from aiohttp import web

from hotrack.bench.client import BenchError, OpenAIClient
from hotrack.bench.plot import sweep_svg
from hotrack.bench.sweep import Spread, sweep
from hotrack.bench.workload import Cell, PromptMaker, calibrate


def make_app(*, status: int = 200, cut: bool = False) -> web.Application:
    """Two tokens per word plus three of overhead; one token per chunk."""

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub"}]})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if status != 200:
            return web.json_response({"error": {"message": "no"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            await asyncio.sleep(0.001)
        if not cut:
            usage = {
                "prompt_tokens": 2 * len(body["prompt"].split()) + 3,
                "completion_tokens": body["max_tokens"],
            }
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    return app


async def with_server(app: web.Application, use):
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        async with OpenAIClient(f"http://{host}:{port}/v1") as client:
            return await use(client)
    finally:
        await runner.cleanup()


def test_sweep_calibrates_prompts_and_counts_tokens(tmp_path):
    cells = [Cell(input_len=103, output_len=5, concurrency=2, repeats=2)]

    async def use(client):
        return await sweep(client, cells, seed=0, progress=lambda _m: None)

    results, facts = asyncio.run(with_server(make_app(), use))
    assert facts == {"model": "stub", "tokens_per_word": 2.0, "overhead_tokens": 3.0}
    (result,) = results
    assert result.prompt_tokens == 103
    assert result.total_tokens_per_s.median > 0
    # Five tokens a millisecond apart: four gaps, so a stream cannot be faster than 1000 tokens/s.
    assert 0 < result.stream_tokens_per_s.high < 1000
    svg = tmp_path / "sweep.svg"
    sweep_svg(svg, "a <title>", results)
    assert "a &lt;title&gt;" in svg.read_text()


@pytest.mark.parametrize(
    ("options", "text"), [({"status": 503}, "HTTP 503"), ({"cut": True}, "without usage")]
)
def test_a_refused_or_cut_stream_is_an_error(options, text):
    async def use(client):
        return await client.complete("hello", 3)

    with pytest.raises(BenchError, match=text):
        asyncio.run(with_server(make_app(**options), use))


def test_prompts_differ_and_repeat_with_the_seed():
    first, second = PromptMaker(1), PromptMaker(1)
    prompts = [first.prompt(50) for _ in range(20)]
    assert len(set(prompts)) == 20
    assert prompts == [second.prompt(50) for _ in range(20)]
    assert all(len(p.split()) == 50 for p in prompts)


def test_calibrate_and_spread():
    assert calibrate((10, 25), (20, 45)) == (2.0, 5.0)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
