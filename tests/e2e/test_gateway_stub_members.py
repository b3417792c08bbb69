"""A real gateway process over member processes that hold real memory but no model."""

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.served_pool import STUB, ServedPool, all_gone, served_pool
from hotrack.cli.http import ServerError, text_pieces
from hotrack.core.runtime_dir import remove_leftovers

pytestmark = pytest.mark.e2e

POOL = f"""
models:
  a: {{cmd: "{STUB} --uds ${{SOCKET}} --name a --mib 64", sleep_level: 1, aliases: [first]}}
  b: {{cmd: "{STUB} --port ${{PORT}} --name b --mib 64", sleep_level: 1}}
pool:
  memory: {{budget: 140MiB}}
  policy: {{min_residency: 0s, probe_interval: 200ms, backoff: 100ms}}
  sleep: {{drain_timeout: 10s}}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPool]:
    with served_pool(tmp_path_factory.mktemp("pool"), POOL) as served:
        yield served


def ask(pool: ServedPool, model: str, prompt: str, **fields: Any) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}
    if fields.get("stream"):
        return "".join(text_pieces(pool.api.stream("/v1/chat/completions", body)))
    return str(pool.api.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])


def test_models_swap_and_memory_follows(pool: ServedPool) -> None:
    assert ask(pool, "a", "x y") == "a: y x "
    assert ask(pool, "b", "x y", stream=True) == "b: y x "
    assert ask(pool, "first", "x") == "a: x "
    swaps = [swap for swap in pool.api.get("/api/pool/swaps")["swaps"] if swap["cause"] != "boot"]
    assert [(swap["from"], swap["to"], swap["result"]) for swap in swaps[-2:]] == [
        (["a"], "b", "ok"),
        (["b"], "a", "ok"),
    ]
    for swap in swaps[-2:]:
        assert swap["victim_bytes_before"] - swap["victim_bytes_after"] >= 60 << 20
        assert swap["target_bytes_after"] - swap["target_bytes_before"] >= 60 << 20
        assert swap["canary"] == "identical"


def test_two_clients_at_once_are_both_answered(pool: ServedPool) -> None:
    answers: dict[str, list[str]] = {"a": [], "b": []}

    def client(model: str) -> None:
        for number in range(5):
            answers[model].append(ask(pool, model, f"w{number}", stream=number % 2 == 0))

    threads = [threading.Thread(target=client, args=(name,)) for name in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {name: [f"{name}: w{number} " for number in range(5)] for name in answers}


def test_a_running_stream_finishes_before_its_member_sleeps(pool: ServedPool) -> None:
    ask(pool, "a", "warm")
    prompt = " ".join(f"w{i}" for i in range(20))
    result: list[str] = []
    thread = threading.Thread(target=lambda: result.append(ask(pool, "a", prompt, stream=True, delay_ms=40)))
    thread.start()
    pool.until(lambda: pool.members()["a"]["num_in_flight"] == 1, "the stream running")
    assert ask(pool, "b", "x") == "b: x "
    thread.join(10)
    assert result == ["a: " + " ".join(reversed(prompt.split())) + " "]


def test_a_client_that_hangs_up_mid_stream_frees_its_place(pool: ServedPool) -> None:
    ask(pool, "a", "warm")
    connection = http.client.HTTPConnection("127.0.0.1", int(pool.api.url.rsplit(":", 1)[1]))
    body = {
        "model": "a",
        "stream": True,
        "delay_ms": 200,
        "messages": [{"role": "user", "content": "w " * 200}],
    }
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.read(10)
    assert pool.members()["a"]["num_in_flight"] == 1
    response.close()
    connection.close()
    pool.until(lambda: pool.members()["a"]["num_in_flight"] == 0, "the place freed", 10)


def test_a_50_mb_body_is_refused_and_the_connection_survives(pool: ServedPool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(pool.api.url.rsplit(":", 1)[1]), timeout=30)
    connection.request("POST", "/v1/chat/completions", b"x" * 50_000_000)
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["code"] == "payload_too_large"
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_endless_headers_are_cut(pool: ServedPool) -> None:
    with socket.create_connection(("127.0.0.1", int(pool.api.url.rsplit(":", 1)[1])), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nx: ")
        answer = b""
        try:
            for _ in range(40):
                client.sendall(b"a" * 8192)
            answer = client.recv(100)
        except ConnectionError:
            return
        assert b" 400 " in answer


def test_logs_of_a_member_are_streamed(pool: ServedPool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(pool.api.url.rsplit(":", 1)[1]), timeout=10)
    connection.request("GET", "/logs/stream/a")
    response = connection.getresponse()
    assert response.status == 200
    assert b"stub member a" in response.readline()
    connection.close()


def test_unknown_models_and_broken_bodies_are_typed(pool: ServedPool) -> None:
    with pytest.raises(ServerError, match="served models: a, b") as caught:
        ask(pool, "nope", "x")
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")
    with pytest.raises(ServerError) as caught:
        pool.api.post("/v1/chat/completions", [1])
    assert caught.value.status_code == 400


def ask_or_refusal(pool: ServedPool) -> str | None:
    """An answer of ``a``, or None for an honest and temporary refusal."""
    try:
        return ask(pool, "a", "x")
    except ServerError as error:
        if error.status_code in (502, 503):
            return None
        raise


def test_a_killed_member_is_noticed_and_comes_back(pool: ServedPool) -> None:
    ask(pool, "a", "warm")
    pid = pool.members()["a"]["pid"]
    body = {
        "model": "a",
        "stream": True,
        "delay_ms": 100,
        "messages": [{"role": "user", "content": "w " * 100}],
    }
    pieces = pool.api.stream("/v1/chat/completions", body)
    next(pieces)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerError) as caught:
        list(text_pieces(pieces))
    assert caught.value.code in ("bad_gateway", "member_failed")
    assert pool.until(lambda: ask_or_refusal(pool), "an answer from the restarted member", 30) == "a: x "
    assert pool.members()["a"]["pid"] != pid
    assert ask(pool, "b", "x") == "b: x "


def test_kill_9_of_the_gateway_leaves_no_orphan(tmp_path: Path) -> None:
    with served_pool(tmp_path, POOL) as own:
        processes = own.processes()
        assert len(processes) >= 3
        own.process.kill()
        own.process.wait()
        own.until(lambda: all_gone(processes), "every member gone", 10)
        assert remove_leftovers()  # as the next gateway does


def test_sigterm_ends_members_in_order_and_exits_zero(tmp_path: Path) -> None:
    with served_pool(tmp_path, POOL) as own:
        processes = own.processes()
        own.process.send_signal(signal.SIGTERM)
        assert own.process.wait(20) == 0
        assert all_gone(processes)
        assert "Traceback" not in own.text()


def test_sigterm_ends_running_streams_with_an_error_event(tmp_path: Path) -> None:
    with served_pool(tmp_path, POOL) as own:
        ask(own, "a", "warm")
        body = {
            "model": "a",
            "stream": True,
            "delay_ms": 200,
            "messages": [{"role": "user", "content": "w " * 99}],
        }
        lines = own.api.stream("/v1/chat/completions", body)
        next(lines)
        own.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerError) as caught:
            list(text_pieces(lines))
        assert caught.value.code == "draining"
        assert own.process.wait(20) == 0
