"""Times the MoE, few-row and sampling kernels on one GPU against torch's own; prints JSON.

    python tools/bench_moe.py [--json FILE] [--only decode,prefill,float8,linear,sampling] [--sweep]

Weights are random; every timed call takes another layer's, so that nothing is found in the cache. Decode is
timed as a replayed graph over all layers, prefill with events. Bytes are those of the experts hit, counted
once, plus nothing else; the floor is that over the copy bandwidth measured in the same run.
"""

import argparse
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from hotrack.kernels.cuda_ops import moe as torch_moe
from hotrack.kernels.triton import gemv, moe_grouped, moe_routing, sampling
from hotrack.kernels.triton.device import device_of
from hotrack.kernels.triton.moe_grouped import Tile

D, I, E, K = 2048, 768, 128, 8  # noqa: E741 Qwen3-30B-A3B
DEVICE = torch.device("cuda")
Step = Callable[[], object]


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=DEVICE)
    return out.normal_(0, scale)


def graph_time(steps: Sequence[Step], repeats: int = 15) -> float:
    """Median microseconds per step of a graph of all of them."""
    for step in steps[:2]:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [step() for step in steps]
    graph.replay()
    found = event_times([graph.replay], repeats)
    del kept
    return found / len(steps)


def event_times(steps: Sequence[Step], repeats: int) -> float:
    """Median microseconds of a step."""
    for step in steps[:2]:
        step()
    times = []
    for step in itertools.islice(itertools.cycle(steps), repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """GB/s, bytes read plus bytes written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / event_times([lambda: target.copy_(source)], 10) / 1e3


class Layers:
    """Expert stacks and routers' choices of ``count`` layers."""

    def __init__(self, count: int) -> None:
        self.gate_up = [random(E, 2 * I, D, scale=D**-0.5) for _ in range(count)]
        self.down = [random(E, D, I, scale=I**-0.5) for _ in range(count)]

    def inputs(self, tokens: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return [(random(tokens, D), random(tokens, E, dtype=torch.float32)) for _ in range(count)]


def routed(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return moe_grouped.moe_experts(x, gate_up, down, *moe_routing.softmax_topk(logits, K, True))


def torch_routed(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    weights, ids = logits.softmax(-1).topk(K, -1)
    return torch_moe.moe_experts(x, gate_up, down, ids, weights / weights.sum(-1, keepdim=True))


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def bind(run: Callable[..., object], layers: Layers, inputs: list[tuple[Tensor, Tensor]]) -> list[Step]:
    return [
        lambda a=a, g=g, d=d: run(*a, g, d)
        for a, g, d in zip(inputs, itertools.cycle(layers.gate_up), itertools.cycle(layers.down))
    ]


def decode(layers: Layers, bandwidth: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for T in (1, 2, 4, 8, 16, 64, 256):
        inputs = layers.inputs(T, len(layers.down))
        hit = statistics.mean(len(x[1].topk(K, -1).indices.unique()) for x in inputs)
        size = hit * 3 * D * I * 2
        ours, theirs = bind(routed, layers, inputs), bind(torch_routed, layers, inputs)
        times = {"us": graph_time(ours), "torch_us": graph_time(theirs)}
        rows.append({
            "what": "decode", "tokens": T, "experts_hit": round(hit, 1), **times,
            "gb_per_s": size / times["us"] / 1e3, "of_copy": size / times["us"] / 1e3 / bandwidth,
            "floor_us": size / bandwidth / 1e3, "error": relative(ours[0](), theirs[0]()),
        })  # fmt: skip
        show(rows[-1])
    return rows


def decode_float8(count: int, bandwidth: float) -> list[dict[str, object]]:
    """Random float8 weights, scales of one."""
    rows: list[dict[str, object]] = []
    shapes = (2 * I, D), (D, I)
    stacks = [
        tuple(random(E, *shape).to(torch.float8_e4m3fn) for shape in shapes)
        + tuple(torch.ones(E, n // 128, m // 128, device=DEVICE) for n, m in shapes)
        for _ in range(count)
    ]
    for tokens in (1, 8, 64):
        inputs = [(random(tokens, D), random(tokens, E, dtype=torch.float32)) for _ in stacks]
        hit = statistics.mean(len(x[1].topk(K, -1).indices.unique()) for x in inputs)
        size = hit * 3 * D * I
        us = graph_time(
            [functools.partial(routed_float8, *a, *w) for a, w in zip(inputs, stacks, strict=True)]
        )
        rows.append({
            "what": "decode float8", "tokens": tokens, "experts_hit": round(hit, 1), "us": us,
            "gb_per_s": size / us / 1e3, "of_copy": size / us / 1e3 / bandwidth,
        })  # fmt: skip
        show(rows[-1])
    return rows


def routed_float8(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, gate_up_scale: Tensor, down_scale: Tensor
) -> Tensor:
    ids, weights = moe_routing.softmax_topk(logits, K, True)
    return moe_grouped.moe_experts(x, gate_up, down, ids, weights, scales=(gate_up_scale, down_scale))


def prefill(layers: Layers) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for T in (1024, 8192, 65536):
        inputs = layers.inputs(T, 2)
        ours, theirs = bind(routed, layers, inputs), bind(torch_routed, layers, inputs)
        repeats = 10 if T < 65536 else 5
        times = {"us": event_times(ours, repeats), "torch_us": event_times(theirs, repeats)}
        flops = T * K * 6 * D * I
        rows.append({
            "what": "prefill", "tokens": T, **times, "tflops": flops / times["us"] / 1e6,
            "torch_tflops": flops / times["torch_us"] / 1e6, "error": relative(ours[0](), theirs[0]()),
        })  # fmt: skip
        show(rows[-1])
    return rows


def linear(bandwidth: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for (N, width), M in itertools.product(
        ((5120, 2048), (2048, 4096), (E, D), (151_936, 2048)), (1, 2, 8, 16)
    ):
        count = max(4, min(48, (2 << 30) // (N * width * 2)))
        weights = [random(N, width, scale=width**-0.5) for _ in range(count)]
        x = random(M, width)
        size = N * width * 2
        us = graph_time([lambda w=w, x=x: gemv.linear(x, w) for w in weights])
        torch_us = graph_time([lambda w=w, x=x: F.linear(x, w) for w in weights])
        rows.append({
            "what": "linear", "rows": M, "N": N, "K": width, "us": us, "torch_us": torch_us,
            "gb_per_s": size / us / 1e3, "of_copy": size / us / 1e3 / bandwidth,
            "error": relative(gemv.linear(x, weights[0]), F.linear(x, weights[0])),
        })  # fmt: skip
        show(rows[-1])
    return rows


def sampled() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for R in (1, 8, 64, 256):
        logits = [random(R, 151_936, scale=3.0, dtype=torch.float32) for _ in range(4)]
        seeds = torch.arange(R, device=DEVICE)
        for name, (temperature, top_k, top_p) in {
            "greedy": (0.0, 0, 1.0), "random": (1.0, 0, 1.0), "top_k 20": (1.0, 20, 1.0),
            "top_p 0.9": (1.0, 0, 0.9), "top_k 20, top_p 0.9": (1.0, 20, 0.9),
        }.items():  # fmt: skip
            given = sampling.SamplingRows(
                torch.full((R,), temperature, device=DEVICE),
                torch.full((R,), top_k, dtype=torch.int32, device=DEVICE),
                torch.full((R,), top_p, device=DEVICE), torch.zeros(R, device=DEVICE), seeds, seeds,
            )  # fmt: skip
            us = graph_time([lambda x=x, given=given: sampling.sample(x, given) for x in logits])
            rows.append({"what": "sampling", "rows": R, "how": name, "us": us})
            show(rows[-1])
    return rows


def direct(tiles: tuple[Tile, Tile], x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    ids, weights = moe_routing.softmax_topk(logits, K, True)
    return moe_grouped.experts_direct(x, gate_up, down, ids, weights, tiles=tiles)


def in_blocks(
    tiles: tuple[Tile, Tile], x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, block_m: int
) -> Tensor:
    ids, weights = moe_routing.softmax_topk(logits, K, True)
    choices = moe_routing.sort_choices(ids, E, block_m)
    return moe_grouped.combine(moe_grouped.experts_blocks(x, gate_up, down, choices, K, tiles), weights)


def sweep(layers: Layers) -> list[dict[str, object]]:
    """The tiles of decode, one product at a time; shows the best of each."""
    first, second = moe_grouped.choose_direct_tiles(D, I)
    tried = [(Tile(n, k, w), second) for n in (2, 4, 8) for k in (512, 1024, 2048) for w in (4, 8)]
    tried += [(first, Tile(n, 256, w)) for n in (1, 2, 4, 8) for w in (2, 4, 8)]
    cases = [(1, "direct", tiles, functools.partial(direct, tiles)) for tiles in tried]
    for tokens in (8, 64):
        block_m = moe_grouped.choose_block_m(tokens * K, E)
        first, second = moe_grouped.choose_tiles(block_m, 2, device_of(layers.down[0]))
        sizes = list(itertools.product((16, 32, 64, 128), (64, 128), (3, 4)))
        tried = [(Tile(n, k, 4, stages), second) for n, k, stages in sizes if n < 128]
        tried += [(first, Tile(n, k, 4, stages)) for n, k, stages in sizes]
        cases += [
            (tokens, "blocks", tiles, functools.partial(in_blocks, tiles, block_m=block_m)) for tiles in tried
        ]
    rows: list[dict[str, object]] = []
    for tokens, path, tiles, run in cases:
        row: dict[str, object] = {"what": "sweep", "tokens": tokens, "path": path, "tiles": str(tiles)}
        try:
            row["us"] = graph_time(bind(run, layers, layers.inputs(tokens, len(layers.down))), 5)
        except triton.runtime.errors.OutOfResources as error:
            row["failed"] = str(error)
        rows.append(row)
    for tokens in (1, 8, 64):
        done = [row for row in rows if row["tokens"] == tokens and "us" in row]
        for row in sorted(done, key=lambda row: float(str(row["us"])))[:4]:
            show(row)
    return rows


def show(row: dict[str, object]) -> None:
    print(
        "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    parser.add_argument("--only", default="decode,prefill,float8,linear,sampling")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--sweep", action="store_true", help="also try other tiles for decode")
    args = parser.parse_args()
    torch.manual_seed(0)
    wanted = args.only.split(",")
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth:.0f} GB/s")
    rows: list[dict[str, object]] = []
    if {"decode", "prefill"} & set(wanted) or args.sweep:
        layers = Layers(args.layers)
        rows += decode(layers, bandwidth) if "decode" in wanted else []
        rows += prefill(layers) if "prefill" in wanted else []
        rows += sweep(layers) if args.sweep else []
        del layers
        torch.cuda.empty_cache()
    rows += decode_float8(args.layers // 2, bandwidth) if "float8" in wanted else []
    torch.cuda.empty_cache()
    rows += linear(bandwidth) if "linear" in wanted else []
    rows += sampled() if "sampling" in wanted else []
    found = {"device": device, "torch": torch.__version__, "copy_gb_per_s": bandwidth, "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
