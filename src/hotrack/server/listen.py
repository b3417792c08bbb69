"""The listening socket, bound before the model loads: a port in use shows in milliseconds, not after a
minute."""

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from hotrack.config.server import ServerConfig
from hotrack.core.errors import ConfigError


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket that does not listen yet.

    Raises:
        ConfigError: the address is taken or cannot be used; says what to do.
    """
    return _bind_unix(Path(config.uds)) if config.uds is not None else _bind_tcp(config.host, config.port)


def describe(sock: socket.socket) -> str:
    """URL for people, or ``unix:PATH``."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(sock: socket.socket, config: ServerConfig) -> None:
    sock.close()
    if config.uds is not None:
        with suppress(OSError):
            os.unlink(config.uds)


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from None
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there, or pass --port 0 for a free one"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def _bind_unix(path: Path) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)  # only this user may connect
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    finally:
        os.umask(old_mask)
    return sock


def _remove_stale(path: Path) -> None:
    """Unlink a socket nobody listens on any more; refuse anything else that is in the way."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds {path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError(f"--uds {path} is in use by another server; choose another path")
