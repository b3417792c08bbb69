"""Decode and prefill speed of one engine in this process, beside the floor that its bytes set.

    python tools/bench_decode.py --shape qwen3-30b-a3b --batch 1,8,64,256 --out decode.json

Random weights (``--load-format dummy``) or a MODEL folder with --model. Every prompt is random tokens; decode
steps are timed with all KV in the prefix cache, as the difference between a long and a short answer. The
floor of a step is its bytes (weights that it reads, experts that it hits, KV) over the copy bandwidth that is
measured in the same process. Prints a table and writes JSON. Needs neither a server nor a tokenizer.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import make_config
from hotrack.config.engine import EngineConfig
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineRequest, pack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.in_process import InProcessBackend
from hotrack.models.causal_lm import CausalLM

SHORT = 4  # new tokens of the run that is subtracted


class Bench:
    """One engine; prompts of one length."""

    def __init__(self, config: EngineConfig, context: int) -> None:
        started = time.perf_counter()
        self.backend = InProcessBackend(config)
        self.load_s = time.perf_counter() - started
        self.device = torch.device(self.backend.info["device"])
        self.context = context
        self._count = 0

    @property
    def model(self) -> CausalLM:
        return self.backend._core.runner.model  # type: ignore[attr-defined]

    def prompts(self, batch: int, length: int, seed: int) -> list[bytes]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.model.spec.vocab_size, (batch, length), generator=generator)
        return [pack_tokens(row.tolist()) for row in ids]

    def answer(self, prompts: list[bytes], count: int) -> float:
        """Seconds until all have ``count`` greedy tokens."""
        requests = []
        for prompt in prompts:
            self._count += 1
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            requests.append(EngineRequest(str(self._count), prompt, params, count))
        self._synchronize()
        started = time.perf_counter()
        outputs = self.backend.run(requests, lambda _: False)
        seconds = time.perf_counter() - started
        for found in outputs.values():
            if found[-1].finish_reason is FinishReason.ERROR:
                raise SystemExit(f"the engine failed: {found[-1].error}")
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            target.copy_(source)
            seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds)


def decode(bench: Bench, batch: int, new_tokens: int, repeats: int, bandwidth: float) -> dict[str, Any]:
    prompts = bench.prompts(batch, bench.context, seed=batch)
    bench.answer(prompts, 1)  # into the prefix cache
    bench.answer(prompts, SHORT + new_tokens)  # captures what it needs
    steps = []
    for _ in range(repeats):
        short = bench.answer(prompts, SHORT)
        steps.append((bench.answer(prompts, SHORT + new_tokens) - short) / new_tokens)
    step_s = statistics.median(steps)
    hit = distinct_experts(bench, prompts)
    nbytes = step_bytes(bench, batch, hit, bench.context + SHORT + new_tokens // 2)
    return {
        "batch": batch,
        "tokens_per_s": batch / step_s,
        "step_ms": step_s * 1e3,
        "step_ms_all": [step * 1e3 for step in steps],
        "experts_hit": hit,
        "step_bytes": nbytes,
        "floor_ms": nbytes / bandwidth * 1e3,
        "of_floor": nbytes / bandwidth / step_s,
    }


def distinct_experts(bench: Bench, prompts: list[bytes]) -> float | None:
    """Mean over layers and steps of the experts that one decode step hits, counted without graphs."""
    model, runner = bench.model, bench.backend._core.runner  # type: ignore[attr-defined]
    if model.spec.moe is None:
        return None
    graphs, runner.graphs = runner.graphs, None
    found: list[float] = []
    route = model.ops.softmax_topk

    def count(*args: Any) -> Any:
        routed = route(*args)
        if len(routed[0]) == len(prompts):
            found.append(float(routed[0].unique().numel()))
        return routed

    model.ops.softmax_topk = count  # type: ignore[method-assign]
    try:
        bench.answer(prompts, 3)
    finally:
        runner.graphs, model.ops.softmax_topk = graphs, route  # type: ignore[method-assign]
    return statistics.mean(found) if found else None


def step_bytes(bench: Bench, batch: int, hit: float | None, context: int) -> int:
    """What one decode step cannot avoid reading."""
    model, spec = bench.model, bench.model.spec
    nbytes = 0.0
    for name, param in model.named_parameters():
        if name == "embed_tokens.weight" and not spec.tie_word_embeddings:
            continue
        share = 1.0
        if ".experts." in name and hit is not None and spec.moe is not None:
            share = hit / spec.moe.num_experts
        nbytes += param.numel() * param.element_size() * share
    per_token = sum(cache.entry_bytes for cache in model.cache_specs() if hasattr(cache, "entry_bytes"))
    return round(nbytes + batch * context * per_token)


def prefill(bench: Bench, batch: int, length: int, repeats: int) -> dict[str, Any]:
    seconds = []
    for seed in range(repeats + 1):  # never the same prompt: nothing is in the prefix cache
        seconds.append(bench.answer(bench.prompts(batch, length, seed=10_000 + 100 * length + seed), 1))
    best = statistics.median(seconds[1:])
    return {"batch": batch, "length": length, "seconds": best, "tokens_per_s": batch * length / best}


def profile(bench: Bench, batch: int, steps: int) -> None:
    """Where the device's time goes in decode steps."""
    prompts = bench.prompts(batch, bench.context, seed=batch)
    bench.answer(prompts, 1)
    bench.answer(prompts, SHORT)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        bench.answer(prompts, steps)
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    calls = sum(row.count for row in rows)
    print(f"batch {batch}: {total / steps / 1e3:.3f} ms on the device per step, {calls / steps:.0f} kernels")
    for row in rows[:16]:
        share = row.self_device_time_total / steps / 1e3
        print(f"  {share:8.4f} ms {row.count / steps:7.1f} x  {row.key[:90]}")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(options.device)
    batches = [int(text) for text in options.batch.split(",") if text]
    config = EngineConfig(
        model=str(folder),
        load_format="auto" if options.model else "dummy",
        device=options.device,
        max_num_batched_tokens=options.batched_tokens,
        max_model_len=max(options.context + options.new_tokens + 16, options.prefill_tokens + 16),
        max_num_seqs=max([*batches, options.prefill_batch]),
        kv_cache_memory_bytes=int(options.kv_gib * 2**30),
        enforce_eager=options.eager,
    )
    bandwidth = copy_bandwidth(device)
    bench = Bench(config, options.context)
    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "model": folder.name,
        "synthetic": not options.model,
        "load_s": bench.load_s,
        "copy_bytes_per_s": bandwidth,
        "context": options.context,
        "eager": options.eager,
        "prefill": [],
        "decode": [],
    }
    print(f"ready in {bench.load_s:.1f} s, copies at {bandwidth / 1e12:.2f} TB/s", flush=True)
    if options.prefill_tokens:
        for batch, length in (
            (1, min(1024, options.prefill_tokens)),
            (options.prefill_batch, options.prefill_tokens),
        ):
            result["prefill"].append(prefill(bench, batch, length, options.repeats))
            print(row_text(result["prefill"][-1]), flush=True)
    for batch in batches:
        result["decode"].append(decode(bench, batch, options.new_tokens, options.repeats, bandwidth))
        print(row_text(result["decode"][-1]), flush=True)
    graphs = bench.backend._core.runner.graphs  # type: ignore[attr-defined]
    if graphs is not None:
        result["graphs"] = {"capture_s": graphs.capture_s, "failure": graphs.failure}
        print(f"graphs: {graphs.failure or graphs.capture_s}", flush=True)
    for batch in [int(text) for text in options.profile.split(",") if text]:
        profile(bench, batch, 16)
    bench.backend.close()
    return result


def row_text(row: dict[str, Any]) -> str:
    if "length" in row:
        shape = f"{row['batch']} x {row['length']}"
        return f"prefill {shape:>10}: {row['seconds'] * 1e3:9.1f} ms {row['tokens_per_s']:10.0f} tok/s"
    hit = "" if row["experts_hit"] is None else f", {row['experts_hit']:.1f} experts hit"
    return (
        f"decode, batch {row['batch']:>3}: {row['step_ms']:8.3f} ms {row['tokens_per_s']:10.1f} tok/s, "
        f"floor {row['floor_ms']:.3f} ms ({row['of_floor']:.0%}){hit}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=make_config.SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--model", type=Path, help="a checkpoint folder instead of random weights")
    parser.add_argument("--device", default="cuda:0", help="cpu only tries the tool out")
    parser.add_argument("--batch", default="1,8,64,256", help="sequences that decode together")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="0: no prefill")
    parser.add_argument("--prefill-batch", type=int, default=8)
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens in one step")
    parser.add_argument("--kv-gib", type=float, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--profile", default="", help="batches whose GPU kernels are printed")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or make_config.write_config(options.shape, Path(scratch) / options.shape)
        result = measure(options, folder)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
