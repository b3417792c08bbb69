"""Times a model's forward pass on the CPU: exact batch sizes and contexts, medians, and where the time goes.

    python tools/bench_forward_cpu.py FOLDER [--dtype bfloat16] [--threads 2] [--profile]

No scheduler, sampler or server takes part. Every decode step runs ``batch`` sequences of ``context``
cached tokens.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.base import Ops
from hotrack.kvcache.spec import group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.models import CausalLM, build_model
from hotrack.modelspec import load_spec

BLOCK = 16
DECODES = [(1, 128), (1, 512), (1, 2048), (8, 128), (8, 512), (32, 128), (32, 512)]
PREFILLS = [128, 512, 2048]


def load(folder: Path, dtype: torch.dtype) -> CausalLM:
    device = torch.device("cpu")
    model = build_model(
        load_spec(folder),
        dtype=dtype,
        device=device,
        tp=TensorParallel(),
        allocate=lambda specs: {s.name: torch.zeros(s.shape, dtype=dtype) for s in specs},
    )
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    for target in model.load_plan().values():
        for source in target.sources:
            target.param[source.dest].copy_(weights[source.name][source.select])
    return model


def make_batch(model: CausalLM, new: int, batch: int, context: int, num_blocks: int) -> ForwardBatch:
    """``batch`` sequences that add ``new`` tokens to ``context`` cached ones."""
    total = context + new
    blocks = -(-total // BLOCK)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_blocks, generator=generator)
    tables = order[torch.arange(batch * blocks) % num_blocks].view(batch, blocks)
    positions = torch.arange(context, total).repeat(batch)
    row = torch.arange(batch).repeat_interleave(new)
    slots = tables[row, positions // BLOCK] * BLOCK + positions % BLOCK
    group = GroupTables(tables.int(), slots)
    return ForwardBatch(
        input_ids=torch.randint(0, model.spec.vocab_size, (batch * new,), generator=generator),
        positions=positions,
        query_start=torch.arange(batch + 1, dtype=torch.int32) * new,
        seq_lens=torch.full((batch,), total, dtype=torch.int32),
        logits_rows=torch.arange(batch) * new + new - 1,
        groups=(group,),
        num_decodes=batch if new == 1 else 0,
        query_lens_list=[new] * batch,
        seq_lens_list=[total] * batch,
    )


def measure(step: Callable[[], Any], rounds: int) -> list[float]:
    for _ in range(2):
        step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


class Profile:
    """Wraps the kernels with timers."""

    def __init__(self, model: CausalLM) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        for name in ("rope_tables", "apply_rope", "plan_attention", "write_kv", "paged_attention"):
            self._wrap(model.ops, name, name)
        for name in ("softmax_topk", "moe_experts"):
            self._wrap(model.ops, name, name)
        for layer in model.modules():
            kernel = getattr(layer, "kernel", None)
            if kernel is not None:
                layer.kernel = TimedKernel(kernel, self.spent, type(layer).__name__)  # type: ignore[assignment]

    def _wrap(self, ops: Ops, name: str, label: str) -> None:
        inner = getattr(ops, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            out = inner(*args)
            self.spent[label] += time.perf_counter() - start
            return out

        setattr(ops, name, timed)


class TimedKernel:
    def __init__(self, kernel: Any, spent: dict[str, float], label: str) -> None:
        self.kernel, self.spent, self.label = kernel, spent, label

    def __call__(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self.kernel(x)
        self.spent[self.label] += time.perf_counter() - start
        return out

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        start = time.perf_counter()
        out = self.kernel.add(x, residual)
        self.spent[self.label] += time.perf_counter() - start
        return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--num-blocks", type=int, default=1200)
    parser.add_argument(
        "--profile", action="store_true", help="time per kernel (adds about 1 us to each call)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = load(args.folder, dtype)
    start = time.perf_counter()
    model.after_load()
    print(f"pack {time.perf_counter() - start:.3f} s, {model.prepacked_bytes() / 2**20:.0f} MiB")
    groups = group_layers(model.cache_specs(), BLOCK)
    storage = [torch.zeros(args.num_blocks, g.row_bytes, dtype=torch.uint8) for g in groups]
    kv = KVTensors(groups, storage, dtype)
    profile = Profile(model) if args.profile else None
    cases = [("decode", b, c, 1) for b, c in DECODES] + [("prefill", 1, 0, n) for n in PREFILLS]
    cases.append(("prefix", 1, 512, 64))
    for kind, batch, context, new in cases:
        work = make_batch(model, new, batch, context, args.num_blocks)

        def step(work: ForwardBatch = work) -> Tensor:
            return model.compute_logits(model.forward(work, kv)[work.logits_rows])

        rounds = args.rounds if new == 1 else max(3, args.rounds // 4)
        if profile:
            step()
            profile.spent.clear()
        times = measure(step, rounds)
        median = statistics.median(times)
        rate = batch * new / median * 1e3
        print(
            f"{kind:8} batch {batch:3} context {context:5} new {new:5}: "
            f"median {median:8.2f} ms  best {times[0]:8.2f} ms  {rate:8.1f} tok/s",
            flush=True,
        )
        if profile:
            parts = sorted(profile.spent.items(), key=lambda item: -item[1])
            print("         " + "  ".join(f"{k} {v / (rounds + 2) * 1e3:.2f}" for k, v in parts))


if __name__ == "__main__":
    main()
