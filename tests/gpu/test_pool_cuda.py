"""A pool of two small members on one GPU with room for one: `hotrack serve` as users start it.

Each answers the same before and after sleeping, device memory falls and returns by the driver's own count,
only what is lacking moves, and a member that slept whole comes back by a streamed wake.
"""

import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from fakes.served_pool import ServedPool, served_pool
from hotrack.cli.http import ServerError
from hotrack.members.gpu import Gpu, Gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(200),
]
MIB = 1 << 20
KV_BYTES = 2048 * MIB  # 2,048 sequences of 1,024 tokens of 1 KiB
BUDGET_BYTES = 4710 * MIB  # one awake (KV and a CUDA context) and one asleep (its context), not two awake
SLACK_BYTES = 256 * MIB  # kernels are loaded when they are first used
PROMPTS = {"a": "add 12 30", "b": "sort 3 1 2"}
ENGINE = "{device: cuda, max_model_len: 1024, max_num_seqs: 2048, kv_cache_memory: 2GiB}"
POOL = f"""
models:
  a: {{model: tiny-moe, engine: {ENGINE}}}
  b: {{model: tiny-moe, engine: {ENGINE}}}
pool:
  memory: {{budget: 4710MiB}}
  policy: {{min_residency: 0s, probe_interval: 1s}}
  canary: {{prompts: ["add 12 30"]}}
"""


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = Gpus().find("cuda", {})
    if found is None:
        pytest.skip("NVML is not there")
    return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with served_pool(tmp_path_factory.mktemp("pool"), POOL, ready_s=150.0) as served:
        yield served


def ask(pool: ServedPool, model: str) -> list[int]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": PROMPTS[model],
        "max_tokens": 6,
        "temperature": 0,
        "return_token_ids": True,
    }
    return list(pool.api.post("/v1/completions", body)["choices"][0]["token_ids"])


def on_device(pool: ServedPool, gpu: Gpu) -> dict[str, int]:
    """Bytes per member: the driver's, for every process of the member; compared with what the pool says."""
    found = {}
    for name, row in pool.members().items():
        held = gpu.tree_bytes(row["pid"])
        if held is None:
            pytest.skip("this driver does not tell device memory per process")
        found[name] = held
    return found


def swaps(pool: ServedPool, start: int) -> list[dict[str, Any]]:
    """Since swap ``start``."""
    return [swap for swap in pool.api.get("/api/pool/swaps")["swaps"] if swap["number"] > start]


def last_swap(pool: ServedPool) -> int:
    return max(swap["number"] for swap in swaps(pool, 0))


def test_two_members_take_turns_and_only_the_deficit_moves(pool: ServedPool, gpu: Gpu) -> None:
    start = last_swap(pool)
    asleep = on_device(pool, gpu)
    assert {row["state"] for row in pool.members().values()} == {"asleep"}
    assert max(asleep.values()) < KV_BYTES // 2
    answers: dict[str, list[list[int]]] = {"a": [], "b": []}
    for name, other in ("ab", "ba", "ab", "ba"):
        answers[name].append(ask(pool, name))
        held = on_device(pool, gpu)
        assert held[name] >= asleep[name] + KV_BYTES
        assert sum(held.values()) <= BUDGET_BYTES + SLACK_BYTES
        said = pool.members()
        assert said[name]["device"] == "cuda"
        for one in (name, other):
            assert abs(said[one]["memory_bytes"] - held[one]) <= SLACK_BYTES
        if len(answers["b"]):
            assert asleep[other] + 256 * MIB < held[other] < asleep[other] + KV_BYTES  # a part of it left
    assert answers["a"][0] == answers["a"][1]
    assert answers["b"][0] == answers["b"][1]
    assert answers["a"][0] != answers["b"][0]
    made = swaps(pool, start)
    assert [(swap["from"], swap["to"], swap["result"]) for swap in made] == [
        ([], "a", "ok"),
        (["a"], "b", "ok"),
        (["b"], "a", "ok"),
        (["a"], "b", "ok"),
    ]
    assert {swap["canary"] for swap in made} == {"identical"}
    for swap in made[1:]:
        gone = swap["victim_bytes_before"] - swap["victim_bytes_after"]
        assert 0 < gone < KV_BYTES
    print("\n", *(f"{swap['total_ms']:.1f} ms: {swap}\n" for swap in made))


def test_a_member_that_slept_whole_returns_by_a_streamed_wake(pool: ServedPool, gpu: Gpu) -> None:
    expected = ask(pool, "a")
    awake = on_device(pool, gpu)["a"]
    pool.api.post("/sleep?model=a")
    asleep = on_device(pool, gpu)["a"]
    assert awake - asleep >= KV_BYTES
    assert pool.members()["a"]["state"] == "asleep"
    start = last_swap(pool)
    assert ask(pool, "a") == expected
    (swap,) = swaps(pool, start)
    assert (swap["result"], swap["canary"], swap["streamed"]) == ("ok", "identical", True)
    assert abs(on_device(pool, gpu)["a"] - awake) <= SLACK_BYTES
    print("\n", swap)


def test_a_process_that_was_killed_leaves_no_byte(pool: ServedPool, gpu: Gpu) -> None:
    expected = ask(pool, "a")
    pid = pool.members()["a"]["pid"]
    below = psutil.Process(pid).children(recursive=True)
    (rank,) = [process for process in below if "hotrack.engine.rank" in " ".join(process.cmdline())]
    rank.kill()
    pool.until(lambda: gpu.tree_bytes(pid) is None, "its device memory gone", 20)
    assert pool.until(lambda: _answered(pool), "an answer of the next process", 60) == expected


def _answered(pool: ServedPool) -> list[int] | None:
    try:
        return ask(pool, "a")
    except ServerError:  # refused while it restarts
        return None


def test_this_process_is_read_as_the_driver_reads_it(gpu: Gpu) -> None:
    block = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    with_block = gpu.tree_bytes(os.getpid())
    if with_block is None:
        pytest.skip("this driver does not tell device memory per process")
    used = gpu.memory().used
    del block
    torch.cuda.empty_cache()
    without = gpu.tree_bytes(os.getpid())
    assert without is not None
    assert with_block - without >= 512 * MIB
    assert used - gpu.memory().used >= 512 * MIB
