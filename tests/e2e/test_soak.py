"""Three real engines take turns under mixed load while their processes are killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
MEMBER = "{model: tiny-moe, engine: {max_model_len: 512, kv_cache_memory: 64MiB}, memory: {awake: 600MiB}}"
POOL = f"""
models:
  one: {MEMBER}
  two: {MEMBER}
  three: {MEMBER}
pool:
  memory: {{budget: 1500MiB, margin: 16MiB}}
  policy: {{max_wait: 300ms, min_residency: 0s, max_residency: 1s, max_batch_requests: 16}}
  sleep: {{drain_timeout: 10s}}
"""


def run(folder: Path, *arguments: str, limit_s: float) -> dict[str, object]:
    pool, out = folder / "pool.yaml", folder / "soak.json"
    pool.write_text(POOL)
    done = subprocess.run(
        [sys.executable, "-m", "hotrack", "soak", str(pool), "--out", str(out), *arguments],
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report: dict[str, object] = json.loads(out.read_text())
    return report


def test_short(tmp_path: Path) -> None:
    arguments = ("--seconds", "18", "--clients", "6", "--kill-every", "4", "--restarts", "1")
    report = run(tmp_path, *arguments, limit_s=115)
    assert all(report["invariants"].values())
    assert report["swaps"] >= 10
    assert report["kills"] >= 1
    assert report["restarts"] == 1


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_hundred_swaps(tmp_path: Path) -> None:
    """With 32 clients, random kills and a restart of the gateway."""
    arguments = ("--seconds", "400", "--clients", "32", "--kill-every", "12", "--restarts", "1")
    report = run(tmp_path, *arguments, limit_s=1200)
    assert all(report["invariants"].values())
    assert report["swaps"] >= 500
    assert report["restarts"] == 1
