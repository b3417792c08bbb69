"""How a member starts, refuses to start, and ends: nobody is left waiting, no process is left behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.member_process import MemberProcess, wait_gone

pytestmark = pytest.mark.e2e
FLAGS = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "32MiB", "--served-model-name", "tiny")
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 2000, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def own_member(tiny_model: Path, tmp_path: Path) -> Iterator[MemberProcess]:
    """A member this test may kill."""
    with MemberProcess(tiny_model, *FLAGS, "--drain-timeout", "60", folder=tmp_path) as process:
        yield process.wait_ready()


@contextmanager
def open_stream(member: MemberProcess, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    """A stream that has begun."""
    with closing(member.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": True, **fields}))
        with connection.getresponse() as reply:
            assert reply.status == 200
            assert reply.readline().startswith(b"data: ")
            yield reply


def test_killed_rank_is_answered_for(own_member: MemberProcess) -> None:
    children = own_member.children()
    with open_stream(own_member) as stream:
        os.kill(own_member.ranks()[0].pid, signal.SIGKILL)
        events = stream.read().decode()
    assert '"code":"engine_dead"' in events
    assert "[DONE]" not in events
    try:
        status, body = own_member.get("/health")
        assert (status, body["error"]["code"]) == (503, "engine_dead")
    except OSError:  # it had already left
        pass
    assert own_member.process.wait(15) == 1
    assert wait_gone(children)
    assert "killed by signal 9" in own_member.log


def test_killed_server_takes_everything_with_it(own_member: MemberProcess) -> None:
    children = own_member.children()
    assert len(children) >= 2  # a rank and the template process
    with open_stream(own_member):
        own_member.process.kill()
        own_member.process.wait()
        assert wait_gone(children)


def test_sigterm_lets_running_requests_finish(own_member: MemberProcess) -> None:
    children = own_member.children()
    with open_stream(own_member, max_tokens=200) as stream:
        own_member.process.send_signal(signal.SIGTERM)
        events = stream.read().decode()
    assert events.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in events
    assert own_member.process.wait(15) == 0
    assert wait_gone(children)
    assert not list(Path("/dev/shm").glob(f"*{own_member.process.pid}*"))


def test_second_signal_cuts_streams_short(own_member: MemberProcess) -> None:
    with open_stream(own_member) as stream:
        own_member.process.send_signal(signal.SIGINT)
        own_member.wait_log("stopping")
        own_member.process.send_signal(signal.SIGINT)
        events = stream.read().decode()
    assert '"code":"drain_timeout"' in events
    assert own_member.process.wait(15) == 0


def test_sigterm_while_loading(tiny_model: Path, tmp_path: Path) -> None:
    with MemberProcess(tiny_model, *FLAGS, folder=tmp_path) as member:
        while not member.ranks():
            assert member.process.poll() is None, member.log
        children = member.children()
        member.process.send_signal(signal.SIGTERM)
        assert member.process.wait(15) == 0
        assert wait_gone(children)


def test_a_signal_to_the_whole_group_drains_too(own_member: MemberProcess) -> None:
    """Ranks that died of it would cut the stream short."""
    with open_stream(own_member, max_tokens=300) as reply:
        own_member.signal_group(signal.SIGTERM)
        own_member.wait_log("stopping: no new requests")
        assert b"data: [DONE]" in reply.read()
    began = time.monotonic()
    assert own_member.process.wait(10) == 0
    assert time.monotonic() - began < 5.0


def test_unix_socket(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "member.sock"
    with MemberProcess(tiny_model, *FLAGS, "--uds", str(path), folder=tmp_path) as member:
        member.wait_log("ready at")
        assert path.stat().st_mode & 0o077 == 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(64).startswith(b"HTTP/1.1 200")
        member.process.send_signal(signal.SIGTERM)
        assert member.process.wait(15) == 0
        assert not path.exists()


def refused(*arguments: str, file_blocks: str = "unlimited", **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a server that must not start. ``file_blocks``: the largest file it may write,
    in units of 1 KiB; beyond that it is told what a full disk tells."""
    done = subprocess.run(
        [
            *("bash", "-c", f'ulimit -f {file_blocks}; exec "$@"', "bash"),
            *(sys.executable, "-m", "hotrack.server", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_port_in_use(tiny_model: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        code, text = refused(str(tiny_model), "--port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use" in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--max-model-length", "5"), 2, "did you mean --max-model-len?"),
        (("--host", "0.0.0.0"), 2, "without a key"),
        (("--kv-cache-memory-bytes", "lots"), 2, "kv-cache-memory-bytes"),
        (("--dtype", "float7"), 2, "bfloat16"),
        (("--max-model-len", "9999"), 2, "9999"),
        (("--chat-template", "/nowhere.jinja"), 2, "/nowhere.jinja"),
    ],
)
def test_refused_flags(tiny_model: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    got, text = refused(str(tiny_model), "--port", "0", *arguments)
    assert got == code, text
    assert words in text


def test_missing_model_is_named_before_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        for model, words in ((str(tmp_path / "nothing"), "no file or folder"), ("tiny-mo", "did you mean")):
            code, text = refused(model, "--port", str(sock.getsockname()[1]))
            assert code == 3
            assert words in text
            assert len(text.splitlines()) == 1


def test_unsupported_architecture_is_a_user_error(tmp_path: Path) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = refused(str(tmp_path), "--port", "0")
    assert code == 3, text
    assert "unsupported architecture MambaForCausalLM" in text


@pytest.mark.parametrize(("folder", "file_blocks"), [("/sys/hotrack", "unlimited"), ("", "16")])
def test_a_store_folder_that_is_read_only_or_full(
    tiny_model: Path, tmp_path: Path, folder: str, file_blocks: str
) -> None:
    store = folder or str(tmp_path)
    code, text = refused(str(tiny_model), "--port", "0", file_blocks=file_blocks, HOTRACK_STORE_DIR=store)
    assert code == 2, text
    assert f"bytes in {store}" in text
    assert "HOTRACK_STORE_DIR" in text
