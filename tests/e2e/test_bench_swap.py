"""`hotrack bench swap` as a user runs it, over the CPU twin."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e


def bench_swap(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hotrack", "bench", "swap", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def test_two_members_of_64_mib(tmp_path: Path) -> None:
    out, plot = tmp_path / "swap.json", tmp_path / "swap.svg"
    size = ("--gib", "0.0625", "--tensor-mib", "8", "--cycles", "3", "--store-dir", str(tmp_path))
    done = bench_swap(*size, "--partial", "--json", "--out", str(out), "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    payload = json.loads(done.stdout)
    assert payload == json.loads(out.read_text())
    assert payload["passed"] is True
    assert [outcome["scenario"] for outcome in payload["outcomes"]] == ["cycles", "swap", "partial swap"]
    assert [outcome["faults"] for outcome in payload["outcomes"]] == [[], [], []]
    partial = payload["outcomes"][2]["bytes"]
    assert partial["moved"] < 0.8 * partial["weights"]
    assert payload["links"][0]["gib_per_s"] > 0
    assert plot.read_text().startswith("<svg")


def test_faults_are_typed_errors_that_change_nothing(tmp_path: Path) -> None:
    done = bench_swap("--faults", "--gib", "0.0625", "--tensor-mib", "8", "--store-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass") == 3
    assert "skipped" in done.stdout


def test_real_weights(tmp_path: Path) -> None:
    size = ("--members", "1", "--cycles", "2", "--store-dir", str(tmp_path), "--gib", "0.0625")
    done = bench_swap("--model", "tiny-moe", *size)
    assert done.returncode == 0, done.stderr
    assert "wake, ms" in done.stdout


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    done = bench_swap("--model", str(tmp_path / "nothing"), "--gib", "0.0625")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "nothing" in done.stderr
