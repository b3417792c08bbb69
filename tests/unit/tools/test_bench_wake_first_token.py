"""The first-token bench, tried out on the CPU."""

import json
import sys
from pathlib import Path

import pytest

import bench_wake_first_token as bench
from hotrack.modelspec import load_spec
from hotrack.modelspec.bytes import weight_bytes
from make_config import SHAPES, write_config


def test_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FLOOR_BYTES", 1 << 20)
    out = tmp_path / "out.json"
    options = "--device cpu --shape tiny --prompt-tokens 64 --new-tokens 8 --kv-gib 1 --repeats 1 --cycles 1"
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--out", str(out)])
    assert bench.main() == 0
    assert "2 of 2" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [cycle["streamed"] for cycle in result["cycles"]] == [False, True]
    assert all(cycle["sleep_report"]["is_sleeping"] for cycle in result["cycles"])


def test_shapes_are_those_of_the_published_models(tmp_path: Path) -> None:
    gib = {name: weight_bytes(load_spec(write_config(name, tmp_path / name))) / 2**30 for name in SHAPES}
    assert gib["qwen3-30b-a3b"] == pytest.approx(56.87, abs=0.01)
    assert gib["qwen3-8b"] == pytest.approx(15.26, abs=0.01)
    assert gib["qwen3-next-80b-a3b"] == pytest.approx(148.40, abs=0.01)
