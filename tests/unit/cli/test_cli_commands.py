"""Commands in this process: output, exit codes, and which errors become one line."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotrack import __version__
from hotrack.cli import main as cli
from hotrack.cli.http import Api, ServerError, text_pieces
from hotrack.core.errors import CheckpointError, ConfigError, HotrackError

runner = CliRunner()


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``hotrack ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["hotrack", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version(capsys: Any, monkeypatch: Any) -> None:
    assert run(capsys, monkeypatch, "--version") == (0, f"hotrack {__version__}\n", "")


def test_version_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from hotrack.cli import main; "
        "heavy = {'torch', 'aiohttp', 'uvicorn', 'starlette', 'yaml', 'prometheus_client', 'rich.progress'}; "
        "print(*heavy & set(sys.modules))"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    assert time.perf_counter() - start < 5  # the point is the line above; this only catches disasters


def test_every_command_has_help() -> None:
    shown = runner.invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    for name in (
        "serve",
        "engine",
        "demo",
        "doctor",
        "pull",
        "chat",
        "ps",
        "sleep",
        "wake",
        "validate",
        "config",
        "bench",
    ):
        assert name in shown.output
        if name != "engine":  # its help is the server's
            assert runner.invoke(cli.app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (CheckpointError("x"), 3),
        (HotrackError("x"), 1),
        (ServerError("x", status_code=503), 1),
    ],
)
def test_exit_codes(error: HotrackError, code: int) -> None:
    assert error.exit_code == code


def test_validate_accepts_and_counts(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text("startPort: 1000\nmodels:\n a: {model: nowhere/yet}\n b: {cmd: 'x ${PORT}'}\n")
    code, out, _ = run(capsys, monkeypatch, "validate", str(path))
    assert code == 0
    assert "warning: startPort: accepted" in out
    assert "2 models, no errors" in out
    code, out, _ = run(capsys, monkeypatch, "validate", str(path), "--json")
    assert json.loads(out)["models"] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("models:\n  a: {modl: x}\n", "did you mean 'model'?"),
        ("models:\n a: {model: x}\n a: {model: y}\n", "written twice"),
        ("models: {a: {cmd: serve}}", "must contain ${PORT}"),
        ("models: {a: {model: smolm2}}", "models.a.model: unknown model 'smolm2': did you mean 'smollm2'?"),
        ("models: {a: {model: tiny_moe}}", "did you mean 'tiny-moe'?"),
        ("models: {a: {model: ./nowhere}}", "models.a.model: no file or folder nowhere"),
        ("models: {a: {model: a/b/c}}", "unknown model 'a/b/c'"),
        ("models: {1: {model: tiny-moe}}", 'write it in quotes: "1"'),
        ("models: {true: {model: tiny-moe}}", 'write it in quotes: "true"'),
        ("models:\n  null:\n", 'write it in quotes: "null"'),
        ("models:\n 1:\n true:\n null:\n", "pool.yaml:2: models.1: YAML does not read this model id as text"),
        (
            "models: {a: {model: o/x, memory: {awake: 2GiB}}, b: {model: o/y, memory: {awake: 3GiB}}}\n"
            "pool: {memory: {budget: 1GiB}}",
            "cannot be awake even with every other member asleep: pool a 2.00 GiB",
        ),
    ],
)
def test_validate_refuses_on_one_line(
    tmp_path: Path, capsys: Any, monkeypatch: Any, text: str | None, words: str
) -> None:
    path = tmp_path / "pool.yaml"
    if text is not None:
        path.write_text(text)
    code, out, err = run(capsys, monkeypatch, "validate", str(path))
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("hotrack: ")
    assert err.count("\n") == 1


def test_validate_warns_when_nothing_is_left_for_sleepers(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    path = tmp_path / "pool.yaml"
    text = (
        "models:\n a: {{model: tiny-moe, memory: {{awake: 500MiB}}}}\n b: {{model: tiny-moe}}\n"
        "pool: {{memory: {{budget: {}MiB}}}}"
    )
    path.write_text(text.format(500 + 200 + 64 - 1))
    code, out, _ = run(capsys, monkeypatch, "validate", str(path))
    assert code == 0
    (warning,) = [line for line in out.splitlines() if "may never fit" in line]
    assert "a may never fit: a process of the engine usually holds about 200 MiB" in warning
    assert "pool a 500 MiB (operator) + residue b 200 MiB (assumed)" in warning
    path.write_text(text.format(500 + 200 + 64))
    _, out, _ = run(capsys, monkeypatch, "validate", str(path))
    assert "may never fit" not in out


def test_config_schema_is_json(capsys: Any, monkeypatch: Any) -> None:
    code, out, _ = run(capsys, monkeypatch, "config", "schema")
    assert code == 0
    assert json.loads(out)["title"] == "hotrack pool file"


def test_nobody_listening_is_one_line_with_a_remedy(capsys: Any, monkeypatch: Any) -> None:
    for command in (["ps"], ["chat", "hi"], ["sleep", "a"], ["wake", "a"]):
        code, _, err = run(capsys, monkeypatch, *command, "--url", "http://127.0.0.1:9")
        assert code == 1
        assert "is 'hotrack serve' running there?" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("url", ["", "ftp://x", "http://"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Api(url)


def test_text_pieces_reads_chat_and_completion_streams() -> None:
    lines = [
        b": waiting",
        b'data: {"choices": [{"delta": {"content": "a"}}]}',
        b'data: {"choices": [{"text": "b"}]}',
        b'data: {"choices": []}',
        b"data: [DONE]",
    ]
    assert list(text_pieces(iter(lines))) == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([b'data: {"error": {"message": "m", "code": "drain_timeout"}}'], "drain_timeout"),
        ([b'data: {"choices": []}'], "incomplete_stream"),
    ],
)
def test_text_pieces_raises_for_broken_streams(lines: list[bytes], code: str) -> None:
    with pytest.raises(ServerError) as caught:
        list(text_pieces(iter(lines)))
    assert caught.value.code == code
