"""Sockets: a free one, a taken one, and what a dead server left behind."""

import socket
from pathlib import Path

import pytest

from hotrack.config.server import ServerConfig
from hotrack.core.errors import ConfigError
from hotrack.server import listen


def test_free_port() -> None:
    with listen.bind(ServerConfig(port=0)) as sock:
        port = sock.getsockname()[1]
        assert listen.describe(sock) == f"http://127.0.0.1:{port}"


def test_taken_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=r"is in use.*--port 0"):
            listen.bind(ServerConfig(port=other.getsockname()[1]))


def test_unix_socket_is_private_and_removed(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    sock = listen.bind(config)
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0
    assert listen.describe(sock) == f"unix:{tmp_path / 's'}"
    listen.close(sock, config)
    assert not (tmp_path / "s").exists()


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    listen.bind(config).close()  # as a killed server leaves it
    listen.close(listen.bind(config), config)


def test_live_unix_socket_is_respected(tmp_path: Path) -> None:
    config = ServerConfig(uds=str(tmp_path / "s"))
    with listen.bind(config) as sock:
        sock.listen()
        with pytest.raises(ConfigError, match="another server"):
            listen.bind(config)


def test_files_are_never_unlinked(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ConfigError, match="not a socket"):
        listen.bind(ServerConfig(uds=str(tmp_path / "precious")))
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize("uds", ["/nowhere/at/all", "x" * 200])
def test_impossible_unix_socket(uds: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        listen.bind(ServerConfig(uds=uds))
