"""How long a swap of two members of 17 GiB takes through the whole pool, by its own and by a client's clock.

The weights are made up; every byte of them moves. ``pytest -s`` prints the figures.
"""

import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hotrack
from fakes.served_pool import ServedPool, served_pool

GIB = 1 << 30
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 48 * GIB,
        reason="needs a CUDA device with 48 GiB free",
    ),
    pytest.mark.timeout(400),
]
NUM_LAYERS = 42  # of 0.41 GiB each
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 258,
}
ENGINE = (
    "{device: cuda, load_format: dummy, max_model_len: 512, max_num_seqs: 8, max_num_batched_tokens: 512, "
    "kv_cache_memory: 256MiB}"
)
TURNS = 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    folder = tmp_path_factory.mktemp("swap")
    model = folder / "model"
    model.mkdir()
    tiny = Path(hotrack.__file__).parent / "demo_models" / "hotrack-tiny-moe"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, model / name)
    (model / "config.json").write_text(json.dumps(CONFIG))
    text = f"""
models:
  a: {{model: {model}, engine: {ENGINE}}}
  b: {{model: {model}, engine: {ENGINE}}}
pool:
  memory: {{budget: 20GiB}}
  policy: {{min_residency: 0s}}
  canary: {{prompts: ["add 12 30"], max_tokens: 1}}
"""
    with served_pool(folder, text, ready_s=300.0) as served:
        yield served


def ask(pool: ServedPool, model: str) -> float:
    """Seconds from the request to its whole answer of one token."""
    body: dict[str, Any] = {"model": model, "prompt": "sort 3 1 2", "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    pool.api.post("/v1/completions", body)
    return time.perf_counter() - began


def test_a_swap_takes_as_long_as_its_bytes(pool: ServedPool) -> None:
    ask(pool, "a")
    start = max(swap["number"] for swap in pool.api.get("/api/pool/swaps")["swaps"])
    waits = [ask(pool, "ba"[turn % 2]) for turn in range(TURNS)]
    swaps = [swap for swap in pool.api.get("/api/pool/swaps")["swaps"] if swap["number"] > start]
    assert [swap["result"] for swap in swaps] == ["ok"] * TURNS
    moved = [swap["target_bytes_after"] - swap["target_bytes_before"] for swap in swaps]
    print()
    for swap, wait, num_bytes in zip(swaps, waits, moved, strict=True):
        phases = {key: swap[f"{key}_ms"] for key in ("sleep", "wake", "verify", "first_token", "total")}
        print(f"{num_bytes / GIB:.2f} GiB in {wait * 1e3:.1f} ms; {phases}; streamed {swap['streamed']}")
    floor = statistics.median(moved) / 55e9
    total = statistics.median(swap["total_ms"] for swap in swaps) / 1e3
    print(f"median: client {statistics.median(waits):.3f} s, pool {total:.3f} s, link {floor:.3f} s")
    assert statistics.median(moved) > 14 * GIB
    assert total < 1.5 * floor + 0.1
    assert statistics.median(waits) < total + 0.05
