"""The sweep: for every cell, warm up once, then measure ``repeats`` rounds of ``concurrency`` streams."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotrack.bench.client import OpenAIClient, RequestRecord
from hotrack.bench.workload import Cell, PromptMaker, calibrate

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median with the smallest and largest value seen."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class CellResult:
    """``total_tokens_per_s``: output tokens of all streams over the wall time of a round (prefill included).

    ``stream_tokens_per_s``: decode rate of one stream after its first token. ``itl_p99_ms``: 99th percentile
    gap between chunks.
    """

    cell: Cell
    prompt_tokens: float
    ttft_ms: Spread
    stream_tokens_per_s: Spread
    total_tokens_per_s: Spread
    e2e_s: Spread
    itl_p99_ms: float


async def measure_prompt_scale(client: OpenAIClient, seed: int) -> tuple[float, float]:
    """How many prompt tokens this server's tokenizer makes of one word, and what it adds to each prompt."""
    maker = PromptMaker(seed)
    short = await client.complete(maker.words(20), 1)
    long = await client.complete(maker.words(220), 1)
    return calibrate((20, short.prompt_tokens), (220, long.prompt_tokens))


async def run_cell(client: OpenAIClient, cell: Cell, maker: PromptMaker) -> CellResult:
    rounds: list[tuple[float, list[RequestRecord]]] = []
    for round_index in range(cell.repeats + 1):
        prompts = [maker.prompt(cell.input_len) for _ in range(cell.concurrency)]
        start = time.perf_counter()
        records = await asyncio.gather(*(client.complete(p, cell.output_len) for p in prompts))
        if round_index > 0:  # the first round warms the server up
            rounds.append((time.perf_counter() - start, list(records)))
    every = [record for _, records in rounds for record in records]
    gaps = sorted(gap for record in every for gap in record.gaps) or [0.0]
    return CellResult(
        cell=cell,
        prompt_tokens=statistics.mean(r.prompt_tokens for r in every),
        ttft_ms=Spread.of([r.ttft_s * 1e3 for r in every]),
        stream_tokens_per_s=Spread.of([r.decode_tokens_per_s for r in every]),
        total_tokens_per_s=Spread.of(
            [sum(r.output_tokens for r in records) / wall for wall, records in rounds]
        ),
        e2e_s=Spread.of([r.e2e_s for r in every]),
        itl_p99_ms=gaps[min(len(gaps) - 1, int(len(gaps) * 0.99))] * 1e3,
    )


async def sweep(
    client: OpenAIClient, cells: Sequence[Cell], *, seed: int, progress: Progress
) -> tuple[list[CellResult], dict[str, Any]]:
    """Run every cell in order; returns results and what was found out about the server's tokenizer."""
    if not client.model:
        client.model = await client.first_model()
    progress(f"calibrating prompts for {client.model}")
    tokens_per_word, overhead = await measure_prompt_scale(client, seed)
    maker = PromptMaker(seed + 1, tokens_per_word, overhead)
    results = []
    for number, cell in enumerate(cells, 1):
        progress(
            f"[{number}/{len(cells)}] {cell.concurrency} x {cell.input_len} -> {cell.output_len} tokens, "
            f"{cell.repeats} rounds"
        )
        results.append(await run_cell(client, cell, maker))
    return results, {"model": client.model, "tokens_per_word": tokens_per_word, "overhead_tokens": overhead}
