"""The command line: vLLM's spellings, sizes, and help for typing errors."""

import pytest

from hotrack.config.server import ServerConfig, is_loopback
from hotrack.core.errors import ConfigError
from hotrack.server.flags import parse_flags


def test_vllm_spellings() -> None:
    engine, server = parse_flags(
        [
            "model-folder",
            "--tensor-parallel-size=2",
            "--max_model_len",
            "32Ki",
            "--kv-cache-memory-bytes",
            "1.5GiB",
            "--gpu-memory-utilization",
            "0.5",
            "--no-enable-prefix-caching",
            "--no-enable-sleep-mode",
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k",
            "--host",
            "0.0.0.0",
            "--port",
            "0",
        ]
    )
    assert (engine.model, engine.tensor_parallel_size, engine.max_model_len) == ("model-folder", 2, 32768)
    assert (engine.kv_cache_memory_bytes, engine.gpu_memory_utilization) == (3 << 29, 0.5)
    assert (engine.enable_prefix_caching, engine.enable_sleep_mode) == (False, False)
    assert (server.served_model_names, engine.served_model_name) == (("a", "b"), "a")
    assert (server.host, server.port, server.api_key) == ("0.0.0.0", 0, "k")
    assert parse_flags(["m", "-tp", "2"])[0].tensor_parallel_size == 2


def test_defaults_are_those_of_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTRACK_API_KEY", raising=False)
    engine, server = parse_flags(["m"])
    assert server == ServerConfig()
    assert engine.max_num_seqs == type(engine)(model="m").max_num_seqs


def test_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTRACK_API_KEY", "secret")
    assert parse_flags(["m"])[1].api_key == "secret"
    assert parse_flags(["m", "--uds", "/tmp/s"])[1].api_key is None
    assert parse_flags(["m", "--uds", "/tmp/s", "--api-key", "k"])[1].api_key == "k"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no MODEL given"),
        (["m", "--max-model-length", "5"], "did you mean --max-model-len?"),
        (["m", "--max-model"], "did you mean --max-model-len?"),
        (["m", "--xyzzy"], "--help"),
        (["m", "--trust-remote-code"], "not needed"),
        (["m", "n"], "only one MODEL"),
        (["m", "--port", "http"], "--port"),
        (["m", "--port", "99999"], "65535"),
        (["m", "--dtype", "int3"], "bfloat16"),
        (["m", "--device", "tpu"], "auto, cpu, cuda"),
        (["m", "--device", "cuda:x"], "cuda:N"),
        (["m", "--load-format", "pickle"], "--load-format must be one of auto, dummy"),
        (["m", "--kv-cache-memory-bytes", "many"], "--kv-cache-memory-bytes"),
        (["m", "--host", "0.0.0.0"], "without a key"),
        (["m", "--host", "example.org"], "without a key"),
        (["m", "--drain-timeout", "nan"], "--drain-timeout"),
        (["m", "--max-body-bytes", "5"], "--max-body-bytes"),
        (["m", "--generation-config", "mine"], "auto or vllm"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str) -> None:
    monkeypatch.delenv("HOTRACK_API_KEY", raising=False)
    with pytest.raises(ConfigError) as caught:
        parse_flags(argv)
    assert words in caught.value.message


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "localhost", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.org", ""]))
