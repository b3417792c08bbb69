"""The command line as a user meets it: real processes, real exit codes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.served_pool import STUB, ServedPool, served_pool
from fakes.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.e2e

POOL = f"""
models:
  a: {{cmd: "{STUB} --uds ${{SOCKET}} --name a --mib 16", sleep_level: 1}}
  b: {{cmd: "{STUB} --uds ${{SOCKET}} --name b --mib 16", sleep_level: 1}}
apiKeys: [user]
pool: {{admin_keys: [admin], policy: {{min_residency: 0s}}}}
"""


def hotrack(*arguments: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "hotrack", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with served_pool(tmp_path_factory.mktemp("cli"), POOL) as served:
        yield served


def test_ps_chat_sleep_and_wake(pool: ServedPool) -> None:
    user = ("--url", pool.api.url, "--api-key", "user")
    operator = ("--url", pool.api.url, "--admin-key", "admin")
    done = hotrack("chat", "one two", "--model", "a", *user)
    assert (done.returncode, done.stdout) == (0, "a: two one \n")
    done = hotrack("chat", "--model", "a", *user, stdin="x y\n/model b\nx y\n/clear\n")
    assert done.returncode == 0
    assert "a: y x" in done.stdout
    assert "b: y x" in done.stdout
    answer = json.loads(hotrack("chat", "one", "--json", *user).stdout)
    assert answer == {"model": "a", "answer": "a: one "}
    assert hotrack("wake", "b", *operator).stdout.startswith("b is awake")
    rows = {row["name"]: row["state"] for row in json.loads(hotrack("ps", "--json", *user).stdout)["members"]}
    assert rows == {"a": "asleep", "b": "ready"}
    assert json.loads(hotrack("sleep", "b", "--json", *operator).stdout)["status"] == "sleeping"
    shown = hotrack("ps", "--swaps", *user)
    assert shown.returncode == 0
    assert "asleep" in shown.stdout
    refused = hotrack("sleep", "b", "--url", pool.api.url, "--admin-key", "user")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "use an admin key" in refused.stderr


def test_serve_can_say_in_json_where_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    command = [sys.executable, "-m", "hotrack", "serve", str(path), "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None
        listening, ready = json.loads(process.stdout.readline()), json.loads(process.stdout.readline())
        process.terminate()
    assert (listening["event"], ready["event"], ready["models"]) == ("listening", "ready", ["a", "b"])
    assert ready["url"].startswith("http://127.0.0.1:")
    assert process.returncode == 0


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = hotrack("serve", str(path), "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("pool_file", "arguments", "words"),
    [
        (None, (), "cannot read"),
        ("models: {a: {model_: x}}", (), "did you mean 'model'?"),
        ("models: {a: {model: o/x}}", ("--host", "0.0.0.0"), "so an API key (--api-key"),
        ("models: {a: {model: o/x}}", ("--host", "0.0.0.0", "--api-key", "k"), "an admin key"),
        ("models: {a: {model: ./nowhere.gguf}}", (), "no file or folder"),
    ],
)
def test_serve_refuses_at_the_door(
    tmp_path: Path, pool_file: str | None, arguments: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "pool.yaml"
    if pool_file is not None:
        path.write_text(pool_file)
    done = hotrack("serve", str(path), "--port", "0", *arguments)
    assert done.returncode in (2, 3)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_budget_below_a_models_weights_is_refused_with_numbers(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe", "qwen3_moe")
    path = tmp_path / "pool.yaml"
    path.write_text(
        f"models: {{moe: {{model: {tmp_path / 'moe'}, engine: {{kv_cache_memory: 64MiB}}}}}}\n"
        "pool: {memory: {budget: 48MiB}}\n"
    )
    for command in (["validate"], ["serve", "--port", "0"]):
        done = hotrack(*command, str(path))
        assert done.returncode == 2
        assert "'moe' cannot be awake" in done.stderr
        assert "of 48 MiB" in done.stderr


def test_engine_passes_everything_on() -> None:
    done = hotrack("engine", "--help")
    assert done.returncode == 0
    assert "--max-model-len" in done.stdout
    done = hotrack("engine", "m", "--max-modl-len", "5")
    assert done.returncode == 2
    assert "--max-model-len" in done.stderr
