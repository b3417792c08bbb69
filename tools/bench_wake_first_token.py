"""Time to the first token after a wake, in this process: plain and streamed, beside the link's floor.

    python tools/bench_wake_first_token.py --shape qwen3-30b-a3b --out first_token.json

Random weights (``--load-format dummy``) or a MODEL folder with --model. The link floor is the time in which
the same process copies as many bytes as the weights have from pinned memory to the device. Prints a table and
writes JSON. Needs neither a server nor a tokenizer.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import make_config
from hotrack.config.engine import EngineConfig
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.in_process import InProcessBackend

FLOOR_BYTES = 1 << 30
FLOOR_COPIES = 12
STREAMED_BAR = (1.10, 0.40)  # of the floor, of the warm time to the first token


def link_rate(device: torch.device) -> float:
    """Bytes per second from pinned memory; the median copy of several."""
    on_gpu = device.type == "cuda"
    host = torch.empty(FLOOR_BYTES, dtype=torch.uint8, pin_memory=on_gpu).fill_(1)
    there = torch.zeros(FLOOR_BYTES, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(FLOOR_COPIES):
        start = time.perf_counter()
        there.copy_(host)
        seconds.append(time.perf_counter() - start)
    del host, there
    if on_gpu:
        torch.cuda.empty_cache()
    return FLOOR_BYTES / statistics.median(seconds)


class Bench:
    """One engine and one prompt."""

    def __init__(self, config: EngineConfig, prompt: list[int], new_tokens: int) -> None:
        self.backend = InProcessBackend(config)
        self.prompt = pack_tokens(prompt)
        self.new_tokens = new_tokens
        self._count = 0

    def device_used(self) -> int:
        return device_used(torch.device(self.backend.info["device"]))

    def tokens(self, count: int) -> list[int]:
        """The first ``count`` greedy tokens."""
        self._count += 1
        request = EngineRequest(
            str(self._count),
            self.prompt,
            SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
            count,
        )
        outputs = self.backend.run([request], lambda _: False)[request.request_id]
        if outputs[-1].finish_reason is FinishReason.ERROR:
            raise SystemExit(f"the engine failed: {outputs[-1].error}")
        return [token for output in outputs for token in unpack_tokens(output.tokens)]

    def cycle(self, *, streamed: bool, expected: list[int]) -> dict[str, Any]:
        """Sleep, then wake and one token; seconds and bytes."""
        sleep, sleep_s = timed(lambda: self.backend.control("sleep", level=1))
        asleep = self.device_used()
        started = time.perf_counter()
        wake = self.backend.control("wake", streamed=streamed)
        woken = time.perf_counter()
        first = self.tokens(1)
        done = time.perf_counter()
        after = self.tokens(self.new_tokens)
        return {
            "streamed": streamed,
            "sleep_s": sleep_s,
            "wake_s": woken - started,
            "first_token_after_wake_s": done - woken,
            "wake_and_first_token_s": done - started,
            "device_used_asleep_bytes": asleep,
            "identical": first == expected[:1] and after == expected,
            "sleep_report": sleep,
            "wake_report": wake,
        }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Its result, and seconds."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def device_used(device: torch.device) -> int:
    """Bytes of a GPU that are not free, whoever has them; of a CPU, what this process holds."""
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def print_kernels(bench: Bench) -> None:
    """Where a GPU's time goes in one warm prompt."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.tokens(1)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=30))


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    before = device_used(device)
    rate = link_rate(device)
    config = EngineConfig(
        model=str(folder),
        load_format="auto" if options.model else "dummy",
        device=options.device,
        max_num_batched_tokens=options.batched_tokens or options.prompt_tokens,
        max_model_len=options.prompt_tokens + options.new_tokens,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=options.kv_gib << 30,
        enable_prefix_caching=False,
    )
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, 1000, (options.prompt_tokens,), generator=generator).tolist()
    bench, load_s = timed(lambda: Bench(config, prompt, options.new_tokens))
    for _ in range(3):
        bench.tokens(1)
    warm = [timed(lambda: bench.tokens(1))[1] for _ in range(options.repeats)]
    if options.profile and device.type == "cuda":
        print_kernels(bench)
    expected, decode_s = timed(lambda: bench.tokens(options.new_tokens))
    cycles = [
        bench.cycle(streamed=streamed, expected=expected)
        for _ in range(options.cycles)
        for streamed in (False, True)
    ]
    weight_bytes = bench.backend.info["weight_bytes"]
    bench.backend.close()
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "model": folder.name,
        "synthetic": not options.model,
        "prompt_tokens": options.prompt_tokens,
        "info": bench.backend.info,
        "load_s": load_s,
        "device_used_before_bytes": before,
        "link_bytes_per_s": rate,
        "wake_floor_s": weight_bytes / rate,
        "warm_ttft_s": statistics.median(warm),
        "warm_ttft_all_s": warm,
        "decode_tokens_per_s": (options.new_tokens - 1) / (decode_s - statistics.median(warm)),
        "distinct_tokens": len(set(expected)),
        "cycles": cycles,
    }


def summary(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(what, measured, bar)"""

    def median(key: str, streamed: bool | None = None) -> float:
        return statistics.median(
            c[key] for c in result["cycles"] if streamed is None or c["streamed"] == streamed
        )

    floor, warm = result["wake_floor_s"], result["warm_ttft_s"]
    gib = result["info"]["weight_bytes"] / 2**30
    bar = STREAMED_BAR[0] * floor + STREAMED_BAR[1] * warm
    identical = sum(c["identical"] for c in result["cycles"])
    return [
        ("weights", f"{gib:.2f} GiB", ""),
        ("link, pinned to device", f"{result['link_bytes_per_s'] / 2**30:.1f} GiB/s", ""),
        ("wake floor", f"{floor:.3f} s", ""),
        ("load and start", f"{result['load_s']:.1f} s", ""),
        (f"warm first token, {result['prompt_tokens']} tokens", f"{warm:.3f} s", ""),
        ("decode, 1 sequence, eager", f"{result['decode_tokens_per_s']:.1f} tok/s", ""),
        ("sleep", f"{median('sleep_s') * 1e3:.1f} ms", f"<= {20 + gib:.0f} ms"),
        ("wake", f"{median('wake_s', False):.3f} s", f"<= {1.1 * floor:.3f} s"),
        ("wake + first token, plain", f"{median('wake_and_first_token_s', False):.3f} s", ""),
        (
            "wake + first token, streamed",
            f"{median('wake_and_first_token_s', True):.3f} s",
            f"<= {bar:.3f} s",
        ),
        (
            "device bytes asleep beyond an empty process",
            f"{(median('device_used_asleep_bytes') - result['device_used_before_bytes']) / 2**30:.2f} GiB",
            "<= 0.60 GiB",
        ),
        ("cycles with identical tokens", f"{identical} of {len(result['cycles'])}", "all"),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=make_config.SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--model", type=Path, help="a checkpoint folder instead of random weights")
    parser.add_argument("--device", default="cuda:0", help="cpu only tries the tool out")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--batched-tokens", type=int, help="tokens in one step (default: the prompt)")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cycles", type=int, default=5, help="of each kind")
    parser.add_argument("--profile", action="store_true", help="also print the prompt's GPU kernels")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or make_config.write_config(options.shape, Path(scratch) / options.shape)
        result = measure(options, folder)
    rows = summary(result)
    width = max(len(row[0]) for row in rows)
    for what, measured, bar in rows:
        print(f"{what:{width}}  {measured:>14}  {bar}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(cycle["identical"] for cycle in result["cycles"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
