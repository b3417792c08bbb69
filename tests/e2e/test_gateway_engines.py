"""The whole thing on tiny random checkpoints: gateway, two of our own engines, one device budget."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.served_pool import ServedPool, all_gone, served_pool
from hotrack.cli.http import ServerError

pytestmark = pytest.mark.e2e

PROMPTS = {"moe": "sort 3 1 2", "dense": "once upon a time"}


def pool_yaml(folder: Path) -> str:
    from fakes.tiny_checkpoints import write_tiny

    engine = "{max_model_len: 256, kv_cache_memory: 8MiB, num_threads: 1, dtype: float32}"
    write_tiny(folder / "moe", "qwen3_moe", seed=1)
    write_tiny(folder / "dense", "llama", seed=2)
    return f"""
models:
  moe: {{model: {folder / "moe"}, engine: {engine}, aliases: [experts]}}
  dense: {{model: {folder / "dense"}, engine: {engine}}}
pool:
  policy: {{min_residency: 0s, probe_interval: 200ms, backoff: 100ms}}
  sleep: {{drain_timeout: 10s}}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    folder = tmp_path_factory.mktemp("engines")
    with served_pool(folder, pool_yaml(folder)) as served:
        yield served


def ask(pool: ServedPool, model: str, **fields: Any) -> list[int]:
    """Token ids of a greedy completion."""
    body = {
        "model": model,
        "prompt": PROMPTS.get(model, PROMPTS["moe"]),
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    if not fields.get("stream"):
        return list(pool.api.post("/v1/completions", body)["choices"][0]["token_ids"])
    token_ids: list[int] = []
    lines = [line for line in pool.api.stream("/v1/completions", body) if line.startswith(b"data: ")]
    assert lines[-1] == b"data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            token_ids += choice.get("token_ids") or []
    return token_ids


def test_tokens_are_identical_across_swaps_streams_and_aliases(pool: ServedPool) -> None:
    first = {name: ask(pool, name) for name in PROMPTS}
    assert all(len(token_ids) == 12 for token_ids in first.values())
    for turn in range(3):
        for name in PROMPTS:
            assert ask(pool, name, stream=turn % 2 == 0) == first[name]
    assert ask(pool, "experts") == first["moe"]
    swaps = [swap for swap in pool.api.get("/api/pool/swaps")["swaps"] if swap["cause"] == "request"]
    assert len(swaps) >= 7
    assert {swap["result"] for swap in swaps} == {"ok"}
    assert {swap["canary"] for swap in swaps} == {"identical"}


def test_two_clients_at_once(pool: ServedPool) -> None:
    expected = {name: ask(pool, name) for name in PROMPTS}
    found: dict[str, list[list[int]]] = {name: [] for name in PROMPTS}

    def client(name: str) -> None:
        for number in range(4):
            found[name].append(ask(pool, name, stream=number % 2 == 1))

    threads = [threading.Thread(target=client, args=(name,)) for name in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert found == {name: [token_ids] * 4 for name, token_ids in expected.items()}


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"max_tokens": -1}, 400), ({"prompt": "x " * 2000}, 400), ({"temperature": "hot"}, 400)],
)
def test_the_members_own_refusals_pass_through(pool: ServedPool, fields: dict[str, Any], status: int) -> None:
    with pytest.raises(ServerError) as caught:
        ask(pool, "moe", **fields)
    assert caught.value.status_code == status
    assert caught.value.code


def test_tokenize_goes_to_the_member(pool: ServedPool) -> None:
    tokens = pool.api.post("/tokenize", {"model": "dense", "prompt": "abc"})["tokens"]
    assert pool.api.post("/detokenize", {"model": "dense", "tokens": tokens})["prompt"] == "abc"


def test_the_openai_client_works_through_the_gateway(pool: ServedPool) -> None:
    from openai import NotFoundError, OpenAI

    with OpenAI(base_url=pool.api.url + "/v1", api_key="unused", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {"moe", "dense"}
        options: Any = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
        for name in ("moe", "dense"):
            whole = client.completions.create(model=name, **options)
            assert whole.usage is not None
            pieces = client.completions.create(model=name, stream=True, **options)
            assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
        with pytest.raises(NotFoundError) as caught:
            client.completions.create(model="nope", **options)
        assert caught.value.code == "model_not_found"


def ask_or_refusal(pool: ServedPool) -> list[int] | None:
    """An answer, or None for an honest and temporary refusal."""
    try:
        return ask(pool, "moe")
    except ServerError as error:
        if error.status_code in (500, 502, 503):
            return None
        raise


def test_a_killed_rank_is_replaced(pool: ServedPool) -> None:
    expected = ask(pool, "moe")
    server = pool.members()["moe"]["pid"]
    ranks = [
        p for p in pool.processes() if "hotrack.engine.rank" in " ".join(p.cmdline()) and p.ppid() == server
    ]
    assert ranks
    os.kill(ranks[0].pid, signal.SIGKILL)

    assert pool.until(lambda: ask_or_refusal(pool), "an answer after the restart", 60) == expected
    assert ask(pool, "dense")


def test_kill_9_of_the_gateway_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with served_pool(tmp_path, pool_yaml(tmp_path)) as own:
        processes = own.processes()
        assert any("hotrack.engine.rank" in " ".join(p.cmdline()) for p in processes)
        own.process.kill()
        own.process.wait()
        own.until(lambda: all_gone(processes), "every process gone", 15)
    assert {name for name in set(os.listdir("/dev/shm")) - before if "hotrack" in name} == set()
