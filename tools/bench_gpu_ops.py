"""Times the GPU engine's operations at the shape of one Qwen3-30B-A3B layer, beside what the device could do.

    python tools/bench_gpu_ops.py --tokens 8192 --decodes 64 --context 8192 --out ops.json

Median of device times. ``share``: the part of the roof that was reached, --tflops for products and attention,
--tbps for what only moves bytes (defaults: an H200's bf16 and HBM3e figures). Random values, uniform routing.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotrack.kernels.base import Ops
from hotrack.kernels.cuda_ops import attention, moe
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.ops import select_ops
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors

HEADS = HeadShape(32, 4, 128)
HIDDEN, EXPERTS, TOP_K, WIDTH, BLOCK = 2048, 128, 8, 768, 16
BF16 = torch.bfloat16
SCALE = HEADS.head_dim**-0.5


@dataclass
class Row:
    """``flops`` or ``nbytes`` is what the operation cannot avoid."""

    name: str
    ms: float
    flops: float = 0.0
    nbytes: float = 0.0


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median device time; the L2 cache is not flushed."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, dtype=BF16, device="cuda") * scale


def a_cache(query_lens: list[int], seq_lens: list[int]) -> tuple[LayerKV, PagedBatch]:
    """One of four layers' cache in packed rows, and a step over sequences in scattered blocks."""
    spec = Paged(HEADS.num_kv_heads, HEADS.head_dim, HEADS.head_dim, 2)
    (group,) = group_layers([spec] * 4, BLOCK)
    blocks = [-(-n // BLOCK) for n in seq_lens]
    storage = torch.empty(sum(blocks) + 1, group.row_bytes // 2, dtype=BF16, device="cuda").normal_()
    kv = KVTensors([group], [storage.view(torch.uint8)], BF16).layers[1]
    scattered = (torch.randperm(sum(blocks)) + 1).int()
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    slots = []
    for row, part in enumerate(scattered.split(blocks)):
        tables[row, : len(part)] = part
        position = torch.arange(seq_lens[row] - query_lens[row], seq_lens[row])
        slots.append(part[position // BLOCK].long() * BLOCK + position % BLOCK)
    start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return kv, PagedBatch(
        tables.cuda(), torch.cat(slots).cuda(), query_lens, seq_lens, decodes, BLOCK,
        group.row_bytes // 2, start.cuda(), torch.tensor(seq_lens, dtype=torch.int32).cuda(),
    )  # fmt: skip


class Bench:
    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rows: list[Row] = []

    def add(
        self, name: str, function: Callable[[], object], *, flops: float = 0.0, nbytes: float = 0.0
    ) -> None:
        try:
            spent = milliseconds(function, self.repeats)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{name}: {str(error).splitlines()[0][:120]}")
            return
        self.rows.append(Row(name, spent, flops, nbytes))

    def prefill_attention(self, ops: Ops, tokens: int) -> None:
        H, K, d = HEADS.num_heads, HEADS.num_kv_heads, HEADS.head_dim
        kv, batch = a_cache([tokens], [tokens])
        plan = ops.plan_attention(batch, HEADS, BF16)
        assert isinstance(plan, attention.CudaAttentionPlan)
        q, k, v = random(tokens, H, d), random(tokens, K, d), random(tokens, K, d)
        flops = 2.0 * tokens * tokens * H * d  # half of the square
        self.add("attention plan", lambda: ops.plan_attention(batch, HEADS, BF16))
        self.add("prefill attention", lambda: ops.paged_attention(q, kv, plan, SCALE), flops=flops)
        (span,) = plan.spans
        gathered = 4.0 * 2 * tokens * K * d
        assert kv.rows is not None
        rows = kv.rows
        self.add("  gather", lambda: rows.index_select(0, span.vectors), nbytes=gathered)
        self.add("  flash", lambda: attention.flash_varlen(q, k, v, span, SCALE), flops=flops)
        q4, k4, v4 = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
        wide_k, wide_v = (x.repeat_interleave(H // K, 1) for x in (k4, v4))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

            def grouped(backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(
                        q4, k4, v4, is_causal=True, scale=SCALE, enable_gqa=True
                    )

            def repeated(backend: SDPBackend = backend) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q4, wide_k, wide_v, is_causal=True, scale=SCALE)

            self.add(f"  sdpa {backend.name}, grouped heads", grouped, flops=flops)
            self.add(f"  sdpa {backend.name}, repeated heads", repeated, flops=flops)
        self.add("  repeating K and V", lambda: k4.repeat_interleave(H // K, 1))

    def decode_attention(self, ops: Ops, name: str, batch_size: int, context: int) -> None:
        kv, batch = a_cache([1] * batch_size, [context] * batch_size)
        plan = ops.plan_attention(batch, HEADS, BF16)
        q = random(batch_size, HEADS.num_heads, HEADS.head_dim)
        nbytes = 2.0 * 2 * batch_size * context * HEADS.num_kv_heads * HEADS.head_dim
        label = f"decode attention {batch_size} x {context}, {name}"
        self.add(label, lambda: ops.paged_attention(q, kv, plan, SCALE), nbytes=nbytes)

    def experts(self, ops: Ops, tokens: int, gate_up: Tensor, down: Tensor) -> None:
        x = random(tokens, HIDDEN)
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        slots, weights = ops.softmax_topk(logits, TOP_K, True)
        flops = 2.0 * tokens * TOP_K * 3 * HIDDEN * WIDTH
        used = len(slots.unique())
        nbytes = 2.0 * used * 3 * HIDDEN * WIDTH
        few = tokens < 256  # then the weights are all that counts
        roof = {"nbytes": nbytes} if few else {"flops": flops}
        label = f"{tokens} tokens"
        self.add(f"routing, {label}", lambda: ops.softmax_topk(logits, TOP_K, True))
        whole = lambda: ops.moe_experts(x, gate_up, down, slots, weights)  # noqa: E731
        self.add(f"experts, {label}, {used} of {EXPERTS} used", whole, **roof)
        order, ends = moe.sort_by_expert(slots, EXPERTS)
        rows = x.index_select(0, order // TOP_K)
        half = moe.grouped_linear(rows, gate_up, ends)
        hidden = random(tokens * TOP_K, WIDTH)
        y, place = random(tokens * TOP_K, HIDDEN), moe.inverse_of(order)
        part = {key: value * 2 / 3 for key, value in roof.items()}
        self.add("  sort", lambda: moe.sort_by_expert(slots, EXPERTS))
        self.add("  gather", lambda: x.index_select(0, order // TOP_K), nbytes=2.0 * rows.nbytes)
        self.add("  gate and up", lambda: moe.grouped_linear(rows, gate_up, ends), **part)
        for name, module in self._elementwise().items():
            activate, combine = module
            self.add(f"  activation, {name}", lambda a=activate: a(half), nbytes=1.5 * half.nbytes)
            self.add(
                f"  weighted sum, {name}",
                lambda c=combine: c(y, place, weights),
                nbytes=float(y.nbytes + x.nbytes),
            )
        part = {key: value / 3 for key, value in roof.items()}
        self.add("  down", lambda: moe.grouped_linear(hidden, down, ends), **part)

    def _elementwise(self) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
        found = {"torch": (moe.silu_and_mul, moe.weighted_sum)}
        try:
            from hotrack.kernels.triton_ops import moe as fused  # noqa: PLC0415 - Triton may be missing
        except ImportError:
            return found
        return found | {"fused": (fused.silu_and_mul, fused.combine)}

    def layer(self, kinds: dict[str, Ops], tokens: int) -> None:
        H, K, d = HEADS.num_heads, HEADS.num_kv_heads, HEADS.head_dim
        x, residual = random(tokens, HIDDEN), random(tokens, HIDDEN)
        qkv_weight, out_weight = random((H + 2 * K) * d, HIDDEN), random(HIDDEN, H * d)
        plain = kinds["torch"]
        qkv_linear, out_linear = plain.linear(qkv_weight), plain.linear(out_weight)
        qkv, mixed = qkv_linear(x), random(tokens, H * d)
        self.add("qkv", lambda: qkv_linear(x), flops=2.0 * tokens * qkv_weight.numel())
        self.add(
            "output + residual",
            lambda: out_linear.add(mixed, residual),
            flops=2.0 * tokens * out_weight.numel(),
        )
        norm = plain.rms_norm(random(HIDDEN), 1e-6)
        self.add("norm", lambda: norm(x), nbytes=2.0 * x.nbytes)
        kv, batch = a_cache([tokens], [tokens])
        norms = plain.rms_norm(random(d), 1e-6), plain.rms_norm(random(d), 1e-6)
        frequency = 1e6 ** -(torch.arange(0, d, 2, device="cuda") / d)
        cos, sin = plain.rope_tables(torch.arange(tokens, device="cuda"), frequency, 1.0, BF16)
        for name, ops in kinds.items():
            plan = ops.plan_attention(batch, HEADS, BF16)
            self.add(
                f"norm, rotate, cache, {name}",
                lambda ops=ops, plan=plan: ops.norm_rotate_and_cache(qkv, HEADS, norms, cos, sin, kv, plan),
                nbytes=2.0 * qkv.nbytes,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--decodes", type=int, default=64)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tflops", type=float, default=989.0)
    parser.add_argument("--tbps", type=float, default=4.8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kinds: dict[str, Ops] = {"torch": CudaOps(), "fused": select_ops(torch.device("cuda"), BF16)}
    bench = Bench(options.repeats)
    with torch.inference_mode():
        bench.layer(kinds, options.tokens)
        bench.prefill_attention(kinds["torch"], options.tokens)
        for batch_size in (1, options.decodes):
            for name, ops in kinds.items():
                bench.decode_attention(ops, name, batch_size, options.context)
        gate_up = random(EXPERTS, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
        down = random(EXPERTS, HIDDEN, WIDTH, scale=WIDTH**-0.5)
        for tokens in (options.tokens, options.decodes, 1):
            bench.experts(kinds["fused"], tokens, gate_up, down)
    for row in bench.rows:
        roof_ms = 1e3 * max(row.flops / (options.tflops * 1e12), row.nbytes / (options.tbps * 1e12))
        share = f"{roof_ms / row.ms:6.1%}" if roof_ms else ""
        print(f"{row.name:48} {row.ms:9.3f} ms  {share}")
    if options.out:
        result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text(
            json.dumps(result | {"rows": [asdict(r) for r in bench.rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
