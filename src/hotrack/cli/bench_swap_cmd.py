"""`hotrack bench swap`: sleep and wake against the link, and against other ways to do it."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hotrack.bench.swap import SwapResult
    from hotrack.bench.swap_options import Report

MIB, GIB = 1 << 20, 1 << 30


def swap(
    device: Annotated[
        str, typer.Option(help="'cuda', 'cpu' (same code over ordinary memory) or 'auto'.")
    ] = "auto",
    devices: Annotated[
        str, typer.Option(help="GPU numbers; with several, one member each, waking at the same moment.")
    ] = "0",
    members: Annotated[int, typer.Option(min=1, max=2, help="2: measure swaps between two, too.")] = 2,
    gib: Annotated[
        float | None, typer.Option(help="Weights of a member. Default: 17 on a GPU, 0.25 on a CPU.")
    ] = None,
    tensor_mib: Annotated[int, typer.Option(min=1, help="Size of one weight tensor.")] = 64,
    kv_gib: Annotated[float, typer.Option(min=0.0, help="KV cache of a member, in addition.")] = 0.0,
    graphs: Annotated[int, typer.Option(min=0, help="CUDA graphs that each member captures.")] = 0,
    model: Annotated[
        str | None, typer.Option(help="Real weights of this model instead of random bytes.")
    ] = None,
    cycles: Annotated[int | None, typer.Option(min=1, help="Default: 20 on a GPU, 5 on a CPU.")] = None,
    peer_cycles: Annotated[int, typer.Option(min=1, help="Of each peer, which take seconds each.")] = 4,
    chunk_mib: Annotated[int | None, typer.Option(min=2, help="Bytes mapped and checked at a time.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also with room for one and a half members.")
    ] = False,
    faults: Annotated[
        bool, typer.Option("--faults", help="Only what may go wrong, done on purpose.")
    ] = False,
    peers: Annotated[
        str, typer.Option(help="'auto' (those found), 'none', or the folder that holds them.")
    ] = "auto",
    touch: Annotated[
        bool, typer.Option(help="Touch host memory once first: a virtual machine's is slow then.")
    ] = True,
    store_dir: Annotated[
        Path | None, typer.Option(help="Folder of host copies on a CPU; default HOTRACK_STORE_DIR.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write bars as SVG here.")] = None,
) -> None:
    """How fast members give a device back and return, byte for byte, as a multiple of plain copies."""
    from hotrack.bench.swap import measure, measure_faults
    from hotrack.bench.swap_options import SwapOptions
    from hotrack.bench.swap_peers import find_peers

    kind = _device(device)
    cuda = kind == "cuda"
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot}: plots are SVG; name the file something.svg")
    if graphs and not cuda:
        raise ConfigError(f"--graphs {graphs}: CUDA graphs need --device cuda")
    options = SwapOptions(
        device=kind,
        devices=_numbers(devices),
        members=members,
        nbytes=_bytes("--gib", gib if gib is not None else (17.0 if cuda else 0.25)),
        tensor_bytes=tensor_mib * MIB,
        kv_bytes=_bytes("--kv-gib", kv_gib) if kv_gib else 0,
        graphs=graphs,
        model=model,
        cycles=cycles or (20 if cuda else 5),
        peer_cycles=peer_cycles,
        chunk_bytes=chunk_mib * MIB if chunk_mib else None,
        partial=partial,
        touch=touch and cuda,
        store_dir=str(store_dir) if store_dir else None,
    )
    if faults:
        with _progress() as report:
            result = measure_faults(options, report)
    else:
        found = find_peers(peers) if cuda and model is None else []
        with _progress() as report:
            result = measure(options, found, report)
    _show(result, json_output=json_output, out=out, plot=plot)
    if not result.passed:
        raise typer.Exit(1)


def _show(result: "SwapResult", *, json_output: bool, out: Path | None, plot: Path | None) -> None:
    import json

    from rich.console import Console

    from hotrack.bench import report, swap_plot, swap_table

    payload = {**report.provenance(sys.argv), **result.payload()}
    found = swap_table.rows(result)
    payload["rows"] = [swap_table.row_payload(row) for row in found]
    if out is not None:
        report.write_json(out, payload)
    if plot is not None:
        swap_plot.write_svg(plot, f"{result.options.nbytes / GIB:g} GiB", found)
    if json_output:
        print(json.dumps(payload, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log has no width of its own
    for drawing in swap_table.drawings(result, found):
        console.print(drawing)
    machine = payload["machine"]
    console.print(f"{machine['cpu']}, {machine['cores']} cores; commit {payload['commit']}")


@contextmanager
def _progress() -> Iterator["Report"]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_per_step(console)
        return
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting")

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield report


def _line_per_step(console: "Console") -> "Report":
    """For logs: what has begun, and after how many seconds."""
    start, last = time.monotonic(), ""

    def report(what: str, _done: int, _total: int) -> None:
        nonlocal last
        if what != last:
            console.print(f"{time.monotonic() - start:6.1f} s  {what}", highlight=False)
            last = what

    return report


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device takes auto, cpu or cuda (numbers go to --devices), got {device!r}")
    return device


def _bytes(option: str, gib: float) -> int:
    """A multiple of 1 MiB."""
    nbytes = round(gib * GIB / MIB) * MIB
    if nbytes < MIB:
        raise ConfigError(f"{option} takes at least 1 MiB (0.001), got {gib}")
    return nbytes


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(f"--devices takes different GPU numbers separated by commas, got {text!r}")
    return numbers
