"""`hotrack demo` on two tiny random models: exit code, JSON, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fakes.served_pool import all_gone
from fakes.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.e2e


def demo(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    write_tiny(folder / "moe", "qwen3_moe", seed=1)
    write_tiny(folder / "dense", "llama", seed=2)
    command = [
        sys.executable,
        "-m",
        "hotrack",
        "demo",
        str(folder / "dense"),
        str(folder / "moe"),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_every_check_holds_and_json_says_so(tmp_path: Path) -> None:
    process = demo(tmp_path, "--json", "--plain")
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    report = json.loads(out)
    assert report["ok"]
    assert len(report["checks"]) == 6
    assert all(report["checks"].values())
    assert [swap["to"] for swap in report["swaps"]] == ["dense", "moe", "dense", "moe"]
    assert [answer["model"] for answer in report["answers"]] == ["dense", "moe", "dense", "moe"]
    assert not list(tmp_path.glob("hotrack-demo-*"))


def test_ctrl_c_cleans_up_everything(tmp_path: Path) -> None:
    process = demo(tmp_path, "--plain")
    me = psutil.Process(process.pid)
    deadline = time.monotonic() + 60
    while not any(
        "hotrack.engine.rank" in " ".join(child.cmdline()) for child in me.children(recursive=True)
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = me.children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    assert process.returncode == 130
    deadline = time.monotonic() + 10
    while not all_gone(started):
        assert time.monotonic() < deadline, started
        time.sleep(0.05)
