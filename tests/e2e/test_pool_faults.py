"""What goes wrong around a real gateway: impossible budgets, disks that cannot hold, ranks that stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fakes.served_pool import STUB, TESTS, ServedPool, all_gone, served_pool
from hotrack.cli.http import ServerError

pytestmark = pytest.mark.e2e

ENGINE = "engine: {max_model_len: 256, kv_cache_memory: 8MiB, num_threads: 1}"
FAST = "policy: {min_residency: 0s, probe_interval: 200ms, backoff: 100ms, max_failures: 2}"


def ask(pool: ServedPool, model: str) -> str:
    body = {"model": model, "prompt": "x", "max_tokens": 2, "temperature": 0}
    return str(pool.api.post("/v1/completions", body)["choices"][0]["text"])


def ranks(pool: ServedPool, model: str) -> list[psutil.Process]:
    member = psutil.Process(pool.members()[model]["pid"])
    return [child for child in member.children(recursive=True) if "hotrack.engine.rank" in child.cmdline()]


def test_a_budget_smaller_than_a_model_is_refused_at_start_with_the_sum(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(f"""
models:
  a: {{cmd: "{STUB} --uds ${{SOCKET}} --name a --mib 64", sleep_level: 1}}
  b: {{cmd: "{STUB} --uds ${{SOCKET}} --name b --mib 8", sleep_level: 1}}
pool:
  memory: {{budget: 60MiB}}
""")
    done = subprocess.run(
        [sys.executable, "-m", "hotrack", "serve", str(path), "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hotrack: a can never be awake within its budget: pool a ")
    assert "(measured)" in last
    assert "of 60 MiB" in last
    assert "hotrack: ready" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_a_store_that_cannot_hold_a_model_fails_that_member_only(
    tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    server = f"exec {sys.executable} -m hotrack.server {tiny_model} --uds ${{SOCKET}} --served-model-name bad"
    store = "/sys/hotrack" if fault == "read-only" else str(tmp_path)
    limit = "" if fault == "read-only" else "ulimit -f 16; "  # a larger file gets what a full disk gives
    command = json.dumps(f"bash -c '{limit}{server} --kv-cache-memory-bytes 8MiB --num-threads 1'")
    pool_yaml = f"""
models:
  bad: {{cmd: {command}, sleep_level: 1, env: ["HOTRACK_STORE_DIR={store}"]}}
  good: {{cmd: "{STUB} --uds ${{SOCKET}} --name good --mib 8", sleep_level: 1}}
pool:
  {FAST}
"""
    with served_pool(tmp_path, pool_yaml, "--log-dir", str(tmp_path / "logs")) as pool:
        assert ask(pool, "good").startswith("good: ")
        row = pool.members()["bad"]
        assert row["state"] in ("failed", "starting", "quarantined")
        assert f"bytes in {store}" in row["last_error"]
        pool.until(lambda: pool.members()["bad"]["state"] == "quarantined", "giving up")
        with pytest.raises(ServerError) as refused:
            pool.api.post("/sleep?model=bad")
        assert refused.value.status_code == 503
        with pytest.raises(ServerError, match="HOTRACK_STORE_DIR"):
            ask(pool, "bad")
        assert "HOTRACK_STORE_DIR" in (tmp_path / "logs" / "bad.log").read_text()
        assert "Traceback" not in (tmp_path / "logs" / "bad.log").read_text() + pool.text()


def test_a_killed_rank_takes_its_member_out_of_the_pool_at_once(tiny_model: Path, tmp_path: Path) -> None:
    pool_yaml = f"""
models:
  a: {{model: {tiny_model}, {ENGINE.replace("256", "2048")}}}
pool:
  policy: {{min_residency: 0s, probe_interval: 60s, backoff: 100ms}}
"""
    with served_pool(tmp_path, pool_yaml) as pool:
        before = ask(pool, "a")
        body = {"model": "a", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        lines = pool.api.stream("/v1/completions", body)
        assert next(lines).startswith(b"data: ")
        (rank,) = ranks(pool, "a")
        rank.kill()
        last = [line for line in lines if line.startswith(b"data: ")][-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
        row = pool.members()["a"]
        assert row["state"] != "ready"
        assert "was killed by signal 9" in row["last_error"]
        assert ask(pool, "a") == before  # waits for the new process
        row = pool.members()["a"]
        assert (row["state"], row["last_error"]) == ("ready", "")


def test_a_stopped_rank_is_replaced_and_the_other_model_gets_its_turn(
    tiny_model: Path, tmp_path: Path
) -> None:
    pool_yaml = f"""
models:
  a: {{model: {tiny_model}, {ENGINE}}}
  b: {{cmd: "{STUB} --uds ${{SOCKET}} --name b --mib 8", sleep_level: 1}}
pool:
  {FAST}
  sleep: {{sleep_timeout: 1s, stop_timeout: 2s, drain_timeout: 1s, canary_timeout: 5s}}
"""
    with served_pool(tmp_path, pool_yaml) as pool:
        before = ask(pool, "a")
        (rank,) = ranks(pool, "a")
        old = [rank, psutil.Process(pool.members()["a"]["pid"])]
        os.kill(rank.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert ask(pool, "b").startswith("b: ")  # two sleeps of 1 s time out, then 'a' is ended
        assert time.monotonic() - began < 10
        pool.until(lambda: all_gone(old), "the stopped process gone", 5)
        failed = [
            swap for swap in pool.api.get("/api/pool/swaps")["swaps"] if swap["result"] == "sleep_failed"
        ]
        assert "gave no answer within 1 s" in failed[0]["error"]
        assert ask(pool, "a") == before
        assert pool.members()["a"]["last_error"] == ""
