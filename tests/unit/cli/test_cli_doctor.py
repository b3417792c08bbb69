"""`hotrack doctor`: from config.json alone, in words and as JSON."""

import json
import sys

import pytest

from fakes.nvml import GIB, FakeGpu, FakeNvml
from fakes.published_configs import deepseek_v4_flash, mimo_v2_flash, qwen3_30b_a3b
from fakes.quantised_checkpoints import write_quantised
from fakes.tiny_gguf import write_tiny_gguf
from hotrack.cli import main as cli
from hotrack.config.units import format_size
from hotrack.hub import huggingface
from hotrack.hub.model import ResolvedModel
from hotrack.hub.resolve import resolve_config
from hotrack.members import gpu


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "_load_nvml", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def doctor(capsys, monkeypatch):
    """Exit code, stdout and stderr of ``hotrack doctor ARGUMENTS``."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hotrack", "doctor", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def describe(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_deepseek_v4_from_its_config(doctor, tmp_path):
    code, out, _ = doctor(describe(tmp_path, deepseek_v4_flash(drafts="dspark")))
    assert code == 0
    for text in (
        "304.18 B parameters, 166,878,536,440 bytes",
        "FP8 in blocks of 128x128, experts MXFP4",
        "21 compressed sparse (1:4)",
        "256, 6 per token, 1 shared",
        "draft heads: 3, counted above",
        "3,850 bytes per token + 14.7 MiB per request; 3.8 GiB at 1,048,576 tokens",
        "   4         39.9 GiB  45.4 GiB",
        "cpu: does not fit",
    ):
        assert text in out


def test_json(doctor, tmp_path):
    code, out, _ = doctor(describe(tmp_path, mimo_v2_flash()), "--json", "--max-model-len", "65536")
    facts = json.loads(out)
    assert code == 0
    assert facts["family"] == "mimo_v2_flash"
    assert facts["stored_bytes"] is None
    assert facts["kv_bytes_per_token"] == 23_040
    assert facts["max_model_len"] == 65_536
    four = next(share for share in facts["gpus"] if share["num_gpus"] == 4)
    assert round(four["context_bytes"] / 1e6) == 384  # 65,536 * 5,760 + 6.4 MB of windows
    assert sum(piece["num_bytes"] for piece in facts["weights"]) == facts["weight_bytes"]
    assert facts["fits"][-1]["devices"] == ["cpu"]
    assert facts["unread_drafts"] is True


def test_gpus_of_this_machine(doctor, tmp_path, monkeypatch):
    gpus = FakeNvml(FakeGpu("GPU-a", total=141 * GIB), FakeGpu("GPU-b", total=141 * GIB))
    monkeypatch.setattr(gpu, "_load_nvml", lambda: gpus)
    code, out, _ = doctor(describe(tmp_path, qwen3_30b_a3b()))
    assert code == 0
    assert "2 x cuda:0 (NVIDIA H200): fits: 56.9 GiB of weights in 126.4 GiB, then a request" in out
    code, out, _ = doctor(describe(tmp_path, deepseek_v4_flash()), "--json")
    fit = json.loads(out)["fits"][0]
    assert fit["devices"] == ["cuda:0 (NVIDIA H200)", "cuda:1 (NVIDIA H200)"]
    assert (fit["tensor_parallel_size"], fit["verdict"]) == (2, "fits")


def test_a_quantised_checkpoint_that_is_here(doctor, tmp_path):
    write_quantised(tmp_path, "qwen3_moe", block=(32, 32))
    code, out, _ = doctor(tmp_path)
    assert code == 0
    assert "FP8 in blocks of 32x32; this version keeps float32" in out
    assert f"on disk  {format_size((tmp_path / 'model.safetensors').stat().st_size)} in {tmp_path}" in out
    assert "cpu: fits: " in out


def test_a_gguf_file(doctor, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    code, out, _ = doctor(path)
    assert code == 0
    assert "format   GGUF " in out
    assert f"{path.stat().st_size:,} bytes" in out


def test_more_context_than_trained_for(doctor, tmp_path):
    code, _, err = doctor(describe(tmp_path, qwen3_30b_a3b()), "--max-model-len", "100000")
    assert code == 2
    assert "use at most 40960" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "unsupported architecture GPT2",
        ),
        ({"hidden_size": -1}, "hidden_size must be"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with 'awq'"),
    ],
)
def test_what_it_cannot_describe(change, message, doctor, tmp_path):
    code, out, err = doctor(describe(tmp_path, qwen3_30b_a3b() | change))
    assert (code, out) == (3, "")
    assert message in err


def test_a_repository_gives_its_config_only(doctor, tmp_path, monkeypatch):
    fetched = []

    def download(repo_id, name, *, local_dir, local_files_only):
        fetched.append((repo_id, name))
        local_dir.mkdir(parents=True)
        describe(local_dir, qwen3_30b_a3b())

    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface, "hf_hub_download", download)
    code, out, _ = doctor("some/repo")
    assert code == 0
    assert out.startswith("some/repo: qwen3_moe\n")
    assert doctor("some/repo")[0] == 0
    assert fetched == [("some/repo", "config.json")]  # kept for the next time


def test_a_cached_snapshot_needs_no_network(tmp_path, monkeypatch):
    path = describe(tmp_path, qwen3_30b_a3b()) / "config.json"
    monkeypatch.setattr(huggingface, "try_to_load_from_cache", lambda *_: str(path))
    assert resolve_config("some/repo") == ResolvedModel("folder", tmp_path, "some/repo")


def test_a_repository_without_a_config(doctor, tmp_path, monkeypatch):
    from huggingface_hub.errors import EntryNotFoundError

    def download(*_, **__):
        raise EntryNotFoundError("404")

    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(huggingface, "hf_hub_download", download)
    code, _, err = doctor("some/repo")
    assert code == 3
    assert "has no config.json" in err
