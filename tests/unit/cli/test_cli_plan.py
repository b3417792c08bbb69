"""`hotrack plan`: the field report's rotation, in words and as JSON."""

import json
import sys
from pathlib import Path

import pytest

from hotrack.cli import main as cli

GIB = 1 << 30
ROTATION = """
models:
  dsv4: {cmd: 'serve ${PORT}', memory: {awake: 79GiB, residue: 9GiB}}
  glm: {cmd: 'serve ${PORT}', memory: {awake: 60GiB, residue: 9GiB}}
  mimo: {cmd: 'serve ${PORT}', memory: {awake: 60GiB}}
pool: {memory: {budget: 95GiB, margin: 1GiB}}
"""


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path: Path):
    """Exit code, stdout and stderr of ``hotrack plan ARGUMENTS`` for a pool file."""
    path = tmp_path / "pool.yaml"

    def run(text: str, *arguments: str):
        path.write_text(text)
        monkeypatch.setattr(sys, "argv", ["hotrack", "plan", str(path), *arguments])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_terms_and_largest_pools(plan) -> None:
    code, out, _ = plan(ROTATION, "--json")
    assert code == 0
    (group,) = json.loads(out)["groups"]
    assert (group["total"], group["margin"]) == (95 * GIB, GIB)
    members = {member["name"]: member for member in group["members"]}
    assert members["dsv4"]["pool"] == {"bytes": 79 * GIB, "provenance": "operator"}
    assert members["mimo"]["residue"] == {"bytes": 0, "provenance": "assumed"}
    assert members["dsv4"]["spare_bytes"] == (95 - 1 - 79 - 9) * GIB
    # Beside no sleeper, the largest one, both.
    assert members["mimo"]["largest_pool_bytes"] == [94 * GIB, 85 * GIB, 76 * GIB]
    assert members["dsv4"]["largest_pool_bytes"] == [94 * GIB, 85 * GIB, 85 * GIB]
    assert len(group["warnings"]) == 1


def test_what_does_not_fit_is_said_with_the_sum(plan) -> None:
    code, out, _ = plan(ROTATION, "--budget", "80GiB")
    text = " ".join(out.split())
    assert code == 1
    assert "9.0 GiB short" in text
    assert "dsv4 does not fit: pool dsv4 79.00 GiB (operator) + residue glm 9.00 GiB (operator)" in text
    assert "glm does not fit" not in text
    assert "?: assumed" in text


def test_our_own_models_count_with_their_files_and_a_usual_process(plan) -> None:
    text = "models: {tasks: {model: tiny-moe, engine: {kv_cache_memory: 64MiB}}}"
    code, out, _ = plan(text, "--budget", "2GiB", "--json")
    (member,) = json.loads(out)["groups"][0]["members"]
    assert code == 0
    assert 64 << 20 < member["pool"]["bytes"] < 80 << 20
    assert member["nonpool"]["bytes"] > 64 << 20
    assert member["nonpool"]["provenance"] == "assumed"


def test_no_budget_and_a_bad_one(plan) -> None:
    without = ROTATION.partition("pool:")[0]
    code, _, err = plan(without)
    assert code != 0
    assert "--budget SIZE plans with one" in " ".join(err.split())
    code, _, err = plan(without, "--budget", "80Gi0")
    assert code != 0
    assert "'80Gi0' is not a size" in err
