"""Options of one member's HTTP server."""

import ipaddress
from dataclasses import dataclass

from hotrack.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """``uds`` replaces host and port. ``port`` 0 takes a free one. ``served_model_names``: the first is the
    name in answers.

    ``max_body_bytes``: larger request bodies get 413. ``max_concurrent_requests``: more at once, running and
    waiting together, get 429. ``drain_timeout_s``: how long running requests may
    finish after SIGTERM. ``template_timeout_s``: how long one chat template may render.
    ``generation_config``: 'auto' takes default sampling values from the model's generation_config.json,
    'vllm' does not.

    Raises:
        ConfigError: a value is out of range, or the server would be open to the network without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: str | None = None
    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    generation_config: str = "auto"
    max_body_bytes: int = 8 * 2**20
    max_concurrent_requests: int = 4096
    drain_timeout_s: float = 30.0
    template_timeout_s: float = 5.0
    log_level: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in [0, 65535], got {self.port}")
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(f"--generation-config must be auto or vllm, got {self.generation_config!r}")
        if self.max_concurrent_requests < 1:
            raise ConfigError(
                f"--max-concurrent-requests must be at least 1, got {self.max_concurrent_requests}"
            )
        if self.max_body_bytes < 1024:
            raise ConfigError(f"--max-body-bytes must be at least 1024, got {self.max_body_bytes}")
        for name in ("drain_timeout_s", "template_timeout_s"):
            if not 0 <= getattr(self, name) <= 86400:
                flag = name.removesuffix("_s").replace("_", "-")
                raise ConfigError(f"--{flag} must be in [0, 86400] seconds, got {getattr(self, name)}")
        if self.uds is None and self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without a key: anyone who reaches it could use or stop "
                "the model. "
                "Pass --api-key KEY (or set HOTRACK_API_KEY), or listen on --host 127.0.0.1 or --uds PATH"
            )


def is_loopback(host: str) -> bool:
    """True for addresses only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
