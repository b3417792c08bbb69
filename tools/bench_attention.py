"""Times the Triton attention kernels on one GPU beside torch's scaled_dot_product_attention; JSON on stdout.

    python tools/bench_attention.py [--quick] [--sweep] [--out FILE]

Heads are those of Qwen3-30B-A3B. Every measurement replays a CUDA graph over several layers of random packed
cache, together larger than the L2 cache; times are the median per layer. torch reads dense K and V, which no
paged cache offers: it is the yardstick, not an alternative.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotrack.kernels.paged import HeadShape, LayerKV
from hotrack.kernels.reference.rope import rope_tables
from hotrack.kernels.triton.attention_decode import DecodeConfig, decode_attention
from hotrack.kernels.triton.attention_prefill import PrefillConfig, prefill_attention
from hotrack.kernels.triton.rms_norm import add_rms_norm, rms_norm
from hotrack.kernels.triton.rope_cache import rotate_and_cache
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

HEADS = HeadShape(32, 4, 128)
SCALE = 128**-0.5
BLOCK = 16
DEVICE = "cuda"
CACHE_BYTES = 12 << 30
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DECODE_SWEEP = [
    DecodeConfig(tile, warps, stages, programs)
    for tile, warps, stages in (
        (64, 4, 3),
        (64, 4, 5),
        (64, 4, 7),
        (128, 4, 3),
        (128, 8, 5),
        (32, 4, 7),
        (32, 2, 5),
    )
    for programs in (2, 4)
]
PREFILL_SWEEP = [
    PrefillConfig(*numbers)
    for numbers in (
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 3),
        (128, 32, 8, 5),
    )
]


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def device_seconds(calls: Sequence[Callable[[], object]], replays: int) -> dict[str, float]:
    """Per call: median, and how far the 10th and 90th percentile are apart, as a part of it."""
    for call in (calls[0], calls[-1]):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) / 1e3 / len(calls) for a, b in itertools.pairwise(events))
    median = statistics.median(times)
    return {"seconds": median, "spread": (times[len(times) * 9 // 10] - times[len(times) // 10]) / median}


def paged_layers(batch: int, context: int) -> tuple[list[LayerKV], Tensor]:
    """Random packed rows of up to 48 layers, and shuffled block tables [batch, blocks]."""
    blocks = -(-context // BLOCK)
    layer_bytes = batch * blocks * BLOCK * HEADS.num_kv_heads * 2 * HEADS.head_dim * 2
    layers = max(2, min(48, CACHE_BYTES // layer_bytes))
    (group,) = group_layers([Paged(HEADS.num_kv_heads, HEADS.head_dim, HEADS.head_dim, 2)] * layers, BLOCK)
    storage = torch.empty(1 + batch * blocks, group.row_bytes // 2, device=DEVICE, dtype=torch.bfloat16)
    for part in storage.split(1024):
        part.normal_()
    tables = 1 + torch.randperm(batch * blocks, device=DEVICE).int().view(batch, blocks)
    return KVTensors([group], [storage.view(torch.uint8)], torch.bfloat16).layers, tables


def torch_times(
    batch: int, queries: int, context: int, sets: int, causal: bool, replays: int
) -> dict[str, dict[str, float] | str]:
    """The same work on dense [batch, heads, tokens, d]. Of one query, the heads that share keys are the
    tokens."""
    shape = (batch, 32, queries, 128) if queries > 1 else (batch, 4, 8, 128)
    found: dict[str, dict[str, float] | str] = {}
    inputs = [(rand(*shape), rand(batch, 4, context, 128), rand(batch, 4, context, 128)) for _ in range(sets)]
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel([backend]):
                calls = [
                    lambda s=s: F.scaled_dot_product_attention(
                        *s, is_causal=causal, scale=SCALE, enable_gqa=queries > 1
                    )
                    for s in inputs
                ]
                found[name] = device_seconds(calls, replays)
        except RuntimeError as error:
            found[name] = str(error).splitlines()[0][:120]
    return found


def bench_decode(batch: int, context: int, sweep: bool, replays: int) -> dict[str, object]:
    result = decode_times(batch, context, sweep, replays)
    torch.cuda.empty_cache()
    sets = min(16, result["layers"])
    return result | {"torch": torch_times(batch, 1, context, sets, False, replays)}


def decode_times(batch: int, context: int, sweep: bool, replays: int) -> dict[str, Any]:
    layers, tables = paged_layers(batch, context)
    lens = torch.full((batch,), context, device=DEVICE, dtype=torch.int32)
    queries = [rand(batch, 40, 128)[:, :32] for _ in layers]
    moved = batch * context * HEADS.num_kv_heads * 2 * HEADS.head_dim * 2

    def run(config: DecodeConfig | None) -> dict[str, float]:
        calls = [
            lambda q=q, kv=kv: decode_attention(q, kv, tables, lens, context, SCALE, config=config)
            for q, kv in zip(queries, layers, strict=True)
        ]
        found = device_seconds(calls, replays)
        return found | {"gb_per_s": moved / found["seconds"] / 1e9}

    result = {"op": "decode", "batch": batch, "context": context, "layers": len(layers), "triton": run(None)}
    if sweep:
        result["sweep"] = [{"config": str(c)} | run(c) for c in DECODE_SWEEP]
    return result


def bench_prefill(batch: int, tokens: int, sweep: bool, replays: int) -> dict[str, object]:
    layers, tables = paged_layers(batch, tokens)
    layers = layers[: 8 if batch * tokens < 1 << 15 else 2]
    lens = torch.full((batch,), tokens, device=DEVICE, dtype=torch.int32)
    starts = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * tokens
    queries = [rand(batch * tokens, 40, 128)[:, :32] for _ in layers]
    work = 4 * HEADS.num_heads * HEADS.head_dim * batch * tokens * (tokens + 1) / 2

    def run(config: PrefillConfig | None) -> dict[str, float]:
        calls = [
            lambda q=q, kv=kv: prefill_attention(
                q, kv, tables, starts, lens, batch * tokens, SCALE, config=config
            )
            for q, kv in zip(queries, layers, strict=True)
        ]
        found = device_seconds(calls, replays)
        return found | {"tflop_per_s": work / found["seconds"] / 1e12}

    result: dict[str, object] = {"op": "prefill", "batch": batch, "tokens": tokens, "triton": run(None)}
    if sweep:
        result["sweep"] = [{"config": str(c)} | run(c) for c in PREFILL_SWEEP]
    beside = torch_times(batch, tokens, tokens, len(layers), True, replays)
    for found in beside.values():
        if isinstance(found, dict):
            found["tflop_per_s"] = work / found["seconds"] / 1e12
    return result | {"torch": beside}


def bench_elementwise(tokens: int, replays: int) -> dict[str, object]:
    layers, tables = paged_layers(1, max(BLOCK, tokens))
    places = torch.arange(tokens, device=DEVICE)
    slots = tables[0, places // BLOCK].long() * BLOCK + places % BLOCK
    weights = (rand(128), rand(128))
    angles = torch.rand(64, device=DEVICE)
    cos, sin = rope_tables(torch.arange(tokens, device=DEVICE), angles, 1.0, torch.bfloat16)
    inputs = [(rand(tokens, 40 * 128), rand(tokens, 2048), rand(tokens, 2048)) for _ in layers[:16]]
    weight = rand(2048)
    return {
        "op": "elementwise",
        "tokens": tokens,
        "rotate_and_cache": device_seconds(
            [
                lambda x=x, kv=kv: rotate_and_cache(x[0], HEADS, cos, sin, kv, slots, weights, 1e-6)
                for x, kv in zip(inputs, layers, strict=False)
            ],
            replays,
        ),
        "rms_norm": device_seconds([lambda x=x: rms_norm(x[1], weight, 1e-6) for x in inputs], replays),
        "add_rms_norm": device_seconds(
            [lambda x=x: add_rms_norm(x[1], x[2], weight, 1e-6) for x in inputs], replays
        ),
        "torch_rms_norm": device_seconds(
            [lambda x=x: F.rms_norm(x[1], (2048,), weight, 1e-6) for x in inputs], replays
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one decode and one prefill case")
    parser.add_argument("--sweep", action="store_true", help="also every candidate configuration")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.manual_seed(0)
    decodes = [(b, c) for b in (1, 8, 64, 256) for c in (1024, 8192)]
    prefills = [(1, 1024), (1, 8192), (8, 8192)]
    if args.quick:
        decodes, prefills = [(64, 1024)], [(1, 8192)]
    results: list[dict[str, object]] = []
    for batch, tokens in prefills:
        results.append(bench_prefill(batch, tokens, args.sweep, args.replays))
        print(json.dumps(results[-1]), file=sys.stderr)
    for batch, context in decodes:
        results.append(bench_decode(batch, context, args.sweep, args.replays))
        print(json.dumps(results[-1]), file=sys.stderr)
    for tokens in (1, 64, 256, 8192):
        results.append(bench_elementwise(tokens, args.replays))
        print(json.dumps(results[-1]), file=sys.stderr)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    text = json.dumps(report, indent=1)
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
