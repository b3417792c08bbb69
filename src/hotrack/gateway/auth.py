"""Keys: one set for inference, one for operating the pool."""

import hmac
from dataclasses import dataclass

from hotrack.config.server import is_loopback
from hotrack.core.errors import ConfigError, ForbiddenError, UnauthorizedError
from hotrack.gateway.request import Scope


@dataclass(frozen=True, slots=True)
class Keys:
    """``api``: who may ask models. ``admin``: who may sleep, wake, unload and read logs; without admin keys
    the API keys do. Both empty: everybody who can reach the port, which is then this machine only."""

    api: tuple[str, ...] = ()
    admin: tuple[str, ...] = ()

    def check_api(self, scope: Scope) -> None:
        """Raises UnauthorizedError unless the request carries one of the keys (admin keys count too)."""
        if self.api and not _matches(_presented(scope), self.api + self.admin):
            raise UnauthorizedError("a valid API key is needed; send it as 'Authorization: Bearer KEY'")

    def check_admin(self, scope: Scope) -> None:
        """Raises UnauthorizedError without a known key, ForbiddenError with one that is not an admin's."""
        allowed = self.admin or self.api
        if not allowed:
            return
        key = _presented(scope)
        if _matches(key, allowed):
            return
        if _matches(key, self.api):
            raise ForbiddenError("this key may ask models but not operate the pool; use an admin key")
        raise UnauthorizedError("a valid admin key is needed; send it as 'Authorization: Bearer KEY'")

    def check_bind(self, host: str) -> None:
        """Raises ConfigError for an address that others can reach when a key is missing."""
        if is_loopback(host) or (self.api and self.admin):
            return
        missing = (
            "an API key (--api-key or apiKeys)"
            if not self.api
            else "an admin key (--admin-key or pool.admin_keys)"
        )
        raise ConfigError(
            f"listening on {host} lets other machines in, so {missing} is required; or use --host 127.0.0.1"
        )


def _presented(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return bytes(value[7:].strip())
        if name == b"x-api-key":
            return bytes(value.strip())
    return b""


def _matches(key: bytes, allowed: tuple[str, ...]) -> bool:
    """Constant time in the key's content; every allowed key is compared."""
    found = False
    for candidate in allowed:
        found |= hmac.compare_digest(key, candidate.encode())
    return found
