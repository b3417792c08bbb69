"""`hotrack bench ...`: measurements that anyone can repeat."""

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from hotrack.cli import bench_swap_cmd
from hotrack.core.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Measure a server, or sleep and wake; every number comes with machine, command and commit.",
)


app.command("swap")(bench_swap_cmd.swap)


@app.command()
def sweep(
    url: Annotated[str | None, typer.Option(help="Base URL of any OpenAI-compatible server.")] = None,
    launch: Annotated[
        str | None, typer.Option(help="Start this command, measure it, end it; {port} is filled in.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model the server lists.")] = None,
    input_lens: Annotated[str, typer.Option(help="Prompt tokens, comma separated.")] = "32,512",
    output_len: Annotated[int, typer.Option(min=1)] = 128,
    concurrency: Annotated[str, typer.Option(help="Concurrent streams, comma separated.")] = "1,8,32",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds per cell, after one warm-up.")] = 3,
    api_key: Annotated[str | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option()] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write bars as SVG here.")] = None,
) -> None:
    """Time to first token, decode and total tokens/s per prompt length and number of streams."""
    from hotrack.bench import plot as plots
    from hotrack.bench import report
    from hotrack.bench.sweep import sweep as run
    from hotrack.bench.workload import Cell

    if (url is None) == (launch is None):
        raise ConfigError("give either --url of a running server or --launch with a command to start one")
    cells = [
        Cell(length, output_len, streams, repeats)
        for length in _ints("--input-lens", input_lens)
        for streams in _ints("--concurrency", concurrency)
    ]
    console = Console(stderr=True)
    results, facts = asyncio.run(_measure(url, launch, model, api_key, cells, seed, console, run))
    payload = {**report.provenance(sys.argv), **facts, "cells": [asdict(r) for r in results]}
    if output is not None:
        report.write_json(output, payload)
    if plot is not None:
        plots.sweep_svg(plot, f"{facts['model']} at {launch or url}", results)
    if json_output:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(payload), indent=1).decode())
        return
    out = Console()
    if facts.get("ready_s") is not None:
        out.print(f"launch to ready: {facts['ready_s']:.2f} s")
    out.print(report.sweep_table(f"{facts['model']} at {launch or url}", results))
    out.print(f"{payload['machine']['cpu']}, {payload['machine']['cores']} cores; commit {payload['commit']}")


async def _measure(
    url: str | None,
    launch: str | None,
    model: str | None,
    api_key: str | None,
    cells: list[Any],
    seed: int,
    console: Console,
    run: Any,
) -> tuple[list[Any], dict[str, Any]]:
    from contextlib import AsyncExitStack

    from hotrack.bench.client import OpenAIClient
    from hotrack.bench.launch import launched

    async with AsyncExitStack() as stack:
        ready_s = None
        if launch is not None:
            console.print(f"starting: {launch}")
            server = await stack.enter_async_context(launched(launch))
            url, ready_s = server.url, server.ready_s
        client = await stack.enter_async_context(OpenAIClient(url or "", model, api_key))
        with console.status("measuring") as status:
            results, facts = await run(client, cells, seed=seed, progress=status.update)
        return results, {**facts, "ready_s": ready_s, "target": launch or url}


def _ints(option: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} takes whole numbers separated by commas, got {text!r}") from None
    if not values or min(values) < 1:
        raise ConfigError(f"{option} takes numbers of at least 1, got {text!r}")
    return values
