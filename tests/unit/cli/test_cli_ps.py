"""`hotrack ps` on a narrow screen, commands pointed at somebody else's port, and `chat` in a pipe."""

import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from hotrack.cli import main as cli
from hotrack.cli.http import Api, ServerError
from hotrack.cli.ps_cmd import show

Answer = tuple[int, str, bytes]

MEMBER = {
    "name": "smollm2",
    "state": "quarantined",
    "device": "host",
    "memory_bytes": 585_000_000,
    "awake_bytes": 585_000_000,
    "residue_bytes": 254_000_000,
    "num_waiting": 12,
    "num_in_flight": 3,
    "num_cycles": 1234,
    "wake_s": 1.362,
    "pid": 2_911_699,
    "last_error": "",
}
SWAP = {
    "number": 1234,
    "from": ["smollm2"],
    "to": "qwen3-30b-a3b-instruct",
    "cause": "operator",
    "result": "insufficient_memory",
    **{f"{phase}_ms": 1234.5 for phase in ("drain", "sleep", "start", "wake", "verify", "first_token")},
}


def shown(width: int, members: list[dict[str, Any]], swaps: list[dict[str, Any]] | None = None) -> list[str]:
    text = io.StringIO()
    show(Console(file=text, width=width, color_system=None), members, swaps)
    return text.getvalue().splitlines()


def test_the_device_is_shown_where_a_member_is_on_a_gpu() -> None:
    wide = shown(200, [MEMBER, {**MEMBER, "name": "b", "device": "cuda:1"}])
    assert wide[0].split()[2] == "device"
    assert [line.split()[2] for line in wide[1:]] == ["host", "cuda:1"]
    assert "device" not in shown(200, [MEMBER])[0]


def test_a_member_is_one_line_of_80_characters() -> None:
    lines = shown(80, [MEMBER, {**MEMBER, "name": "b"}])
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    header = lines[0].split()
    assert header[:3] == ["member", "state", "memory"]
    assert {"wait", "run", "wake"} <= set(header)
    assert "pid" not in header  # the first to go
    assert "quarantined" in lines[1]


def test_a_wide_screen_shows_everything() -> None:
    lines = shown(200, [MEMBER])
    assert lines[0].split()[-2:] == ["slept", "pid"]
    assert lines[1].split()[-2:] == ["1234", "2911699"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120])
def test_no_row_wraps_whatever_the_names(width: int) -> None:
    members = [{**MEMBER, "name": "a-model-with-a-name-longer-than-most-" + "x" * 60}, MEMBER]
    lines = shown(width, members, [SWAP])
    assert len(lines) == 3 + 1 + 2
    assert max(map(len, lines)) <= width


def test_an_error_is_a_line_below_the_table_and_no_markup() -> None:
    lines = shown(80, [{**MEMBER, "last_error": "killed [red]by[/red] SIGKILL"}])
    assert lines[2] == "smollm2: killed [red]by[/red] SIGKILL"


class _Handler(BaseHTTPRequestHandler):
    answer: Answer = (200, "text/html", b"")

    def do_GET(self) -> None:
        status, kind, body = self.answer
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def somebody(answer: Answer) -> Iterator[str]:
    kind = type("Handler", (_Handler,), {"answer": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, "text/html", b"<html>\x00secret"), "answered 200 with text/html (server: BaseHTTP/"),
        ((404, "text/html", b"<html>\xff"), "answered 404 with text/html"),
        ((500, "application/json", b"[1]"), "answered 500 with application/json"),
        ((200, "application/json", b'{"members": 1}'), "is not a pool"),
        ((200, "application/json", b"[]"), "is not a pool"),
        ((404, "application/json", b'{"error": {"message": "no", "code": "not_found"}}'), "is not a pool"),
    ],
)
def test_ps_says_who_answered_and_shows_none_of_it(
    capsys: Any, monkeypatch: Any, answer: Answer, words: str
) -> None:
    with somebody(answer) as url:
        monkeypatch.setattr(sys, "argv", ["hotrack", "ps", "--url", url])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
    err = capsys.readouterr().err
    assert leaving.value.code == 1
    assert words in err
    assert "is 'hotrack serve' running there? (--url)" in err
    assert err.count("\n") == 1
    assert "<html>" not in err


def test_a_port_that_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"SSH-2.0-OpenSSH\x00\xff\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ServerError, match="does not speak HTTP") as caught:
            Api(f"http://127.0.0.1:{server.getsockname()[1]}").get("/")
        thread.join()
    assert "SSH" not in caught.value.message


def test_chat_in_a_pipe_prints_answers_only(capsys: Any, monkeypatch: Any) -> None:
    stream = b'data: {"choices": [{"delta": {"content": "Hello."}}]}\n\ndata: [DONE]\n\n'
    with somebody((200, "text/event-stream", stream)) as url:
        monkeypatch.setattr(sys, "argv", ["hotrack", "chat", "--url", url, "--model", "m"])
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
        with pytest.raises(SystemExit) as leaving:
            cli.main()
    assert leaving.value.code in (0, None)
    assert capsys.readouterr() == ("Hello.\nHello.\n", "")


def test_json_numbers_are_rounded(capsys: Any, monkeypatch: Any) -> None:
    with somebody((200, "application/json", json.dumps({"status": "awake", "tags": None}).encode())) as url:
        monkeypatch.setattr(sys, "argv", ["hotrack", "wake", "m", "--json", "--url", url])
        with pytest.raises(SystemExit):
            cli.main()
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert seconds == round(seconds, 3)
