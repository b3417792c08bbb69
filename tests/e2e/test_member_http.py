"""A real member over HTTP: answers, sleep and wake, bad input."""

import json
import socket
from contextlib import closing, suppress
from typing import Any

import pytest

from fakes.member_process import MemberProcess

pytestmark = pytest.mark.e2e
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Once upon a time",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}


def tokens(member: MemberProcess, **fields: Any) -> list[int]:
    status, body = member.post("/v1/completions", {**GREEDY, "return_token_ids": True, **fields})
    assert status == 200, body
    ids: list[int] = body["choices"][0]["token_ids"]
    return ids


def is_asleep(member: MemberProcess) -> bool:
    return bool(member.get("/is_sleeping")[1]["is_sleeping"])


def test_same_tokens_after_every_kind_of_sleep(member: MemberProcess) -> None:
    before = tokens(member)
    assert len(before) == 24
    for level in (0, 1, 2):
        status, body = member.post(f"/sleep?level={level}&mode=wait")
        assert (status, body["status"], body["level"]) == (200, "sleeping", level)
        assert is_asleep(member)
        assert member.get("/health")[0] == 200
        status, body = member.post("/v1/completions", GREEDY)
        assert (status, body["error"]["code"]) == (503, "model_asleep")
        status, body = member.post("/wake_up")
        assert (status, body["status"], body["tags"]) == (200, "awake", None)
        assert not is_asleep(member)
        assert tokens(member) == before


def test_wake_by_tags(member: MemberProcess) -> None:
    before = tokens(member)
    member.post("/sleep?level=1")
    status, body = member.post("/wake_up?tags=weights")
    assert (status, body["status"], body["tags"]) == (200, "sleeping", ["weights"])
    assert is_asleep(member)
    assert member.post("/wake_up?tags=kv_cache")[1]["status"] == "awake"
    assert tokens(member) == before


def test_double_sleep_and_double_wake_change_nothing(member: MemberProcess) -> None:
    for _ in range(2):
        assert member.post("/sleep?level=1")[1]["status"] == "sleeping"
    for _ in range(2):
        assert member.post("/wake_up")[1]["status"] == "awake"
    assert len(tokens(member)) == 24


@pytest.mark.parametrize("part", ["", "&nbytes=1MiB"])
def test_kept_requests_go_on_with_the_same_tokens(member: MemberProcess, part: str) -> None:
    fields = {**GREEDY, "max_tokens": 300, "stream": True}
    _, undisturbed = member.post("/v1/completions", fields)
    with closing(member.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields))
        with connection.getresponse() as reply:
            begun = reply.readline().decode()
            status, body = member.post(f"/sleep?level=1&mode=keep{part}")
            assert (status, body["status"]) == (200, "sleeping")
            missing = member.get("/is_sleeping")[1]["missing_bytes"]
            assert missing == body["report"]["missing_bytes"]
            assert (missing["weights"] == 0) == bool(part)
            woke = member.post("/wake_up")[1]
            assert woke["status"] == "awake"
            assert woke["report"]["mapped_bytes"] == sum(missing.values())
            rest = reply.read().decode()
    assert streamed_text(begun + rest) == streamed_text(undisturbed)


def streamed_text(events: str) -> str:
    lines = [json.loads(line[6:]) for line in events.split("\n\n") if line.startswith("data: {")]
    return "".join(line["choices"][0]["text"] for line in lines)


def test_prefix_cache_shows_in_usage(member: MemberProcess) -> None:
    fields = {**GREEDY, "prompt": "a long enough shared beginning, " * 4}
    member.post("/v1/completions", fields)
    _, body = member.post("/v1/completions", fields)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert member.post("/reset_prefix_cache")[1] == {"success": True}
    _, body = member.post("/v1/completions", fields)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_stream_equals_whole_answer(member: MemberProcess) -> None:
    _, whole = member.post("/v1/completions", GREEDY)
    _, text = member.post("/v1/completions", {**GREEDY, "stream": True})
    assert streamed_text(text) == whole["choices"][0]["text"]
    assert text.endswith("data: [DONE]\n\n")


def test_echo_with_logprobs_scores_the_prompt(member: MemberProcess) -> None:
    _, body = member.post("/v1/completions", {**GREEDY, "echo": True, "logprobs": 2, "max_tokens": 3})
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"][: len(GREEDY["prompt"])] == list(GREEDY["prompt"])
    assert len(logprobs["token_logprobs"]) == len(GREEDY["prompt"]) + 3
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    # The greedy tokens are the likeliest ones.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())


def test_seed_decides_whatever_else_runs(member: MemberProcess) -> None:
    sampled = {"temperature": 1.0, "seed": 11}
    alone = tokens(member, **sampled)
    _, body = member.post("/v1/completions", {**GREEDY, **sampled, "n": 4, "return_token_ids": True})
    assert body["choices"][0]["token_ids"] == alone
    assert body["choices"][1]["token_ids"] != alone


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"\xff\xfe", 400, "invalid_json"),
        ({**GREEDY, "model": "other"}, 404, "model_not_found"),
        ({**GREEDY, "max_tokens": -3}, 400, "invalid_request"),
        ({**GREEDY, "max_tokens": 5000}, 400, "context_length_exceeded"),
        ({**GREEDY, "prompt": "x" * 5000}, 400, "context_length_exceeded"),
        ({**GREEDY, "prompt": [511]}, 200, None),
        ({**GREEDY, "prompt": [512]}, 400, "invalid_request"),
        (b"{" + b" " * (50 << 20), 413, "payload_too_large"),
    ],
)
def test_bad_input(member: MemberProcess, body: Any, status: int, code: str | None) -> None:
    got, answer = member.post("/v1/completions", body)
    assert got == status
    assert answer.get("error", {}).get("code") == code


def test_endless_chunked_body_is_cut(member: MemberProcess) -> None:
    block = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", member.port), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(9):
            sock.sendall(block)
        assert b" 413 " in sock.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("head", [b"x-filler: " + b"a" * 65536, (b"x-filler: " + b"a" * 500 + b"\r\n") * 128])
def test_endless_headers_are_cut(member: MemberProcess, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", member.port), timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with suppress(ConnectionError):  # closed with our data unread, which resets
            for _ in range(64):
                sock.sendall(head)
            assert sock.recv(64).startswith(b"HTTP/1.1 400")
    assert member.get("/health")[0] == 200


def test_client_gone_frees_the_engine(member: MemberProcess) -> None:
    connection = member.connect()
    connection.request("POST", "/v1/completions", json.dumps({**GREEDY, "max_tokens": 1000, "stream": True}))
    assert connection.getresponse().readline().startswith(b"data: ")
    connection.close()
    wait_metric(member, "vllm:num_requests_running", 0.0)
    assert metric(member, "vllm:request_success_total") >= 0


def metric(member: MemberProcess, name: str) -> float:
    lines = [line for line in member.get("/metrics")[1].splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def wait_metric(member: MemberProcess, name: str, value: float) -> None:
    for _ in range(1000):
        if metric(member, name) == value:
            return
    raise AssertionError(f"{name} is {metric(member, name)}, not {value}")
