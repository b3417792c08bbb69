"""Where a member's HTTP server listens."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """``base_url`` has no trailing slash. With ``uds`` set, connections go to that Unix socket and the host
    part of
    ``base_url`` is only what the ``Host`` header says."""

    base_url: str
    uds: Path | None = None

    @classmethod
    def unix(cls, path: Path) -> "Endpoint":
        return cls("http://member", path)

    @classmethod
    def loopback(cls, port: int) -> "Endpoint":
        return cls(f"http://127.0.0.1:{port}")

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else self.base_url
