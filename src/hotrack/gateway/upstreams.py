"""Connections to members, by endpoint."""

from urllib.parse import urlsplit

from hotrack.gateway.upstream import Address, MemberConnections
from hotrack.members.endpoint import Endpoint


class Upstreams:
    """One ``MemberConnections`` per distinct endpoint. Endpoints are few: a member keeps its own."""

    def __init__(self) -> None:
        self._by_endpoint: dict[Endpoint, MemberConnections] = {}

    def of(self, endpoint: Endpoint) -> MemberConnections:
        connections = self._by_endpoint.get(endpoint)
        if connections is None:
            connections = self._by_endpoint[endpoint] = MemberConnections(to_address(endpoint))
        return connections

    def close(self) -> None:
        for connections in self._by_endpoint.values():
            connections.close()
        self._by_endpoint.clear()


def to_address(endpoint: Endpoint) -> Address:
    if endpoint.uds is not None:
        return Address(uds=str(endpoint.uds))
    url = urlsplit(endpoint.base_url)
    return Address(host=url.hostname or "127.0.0.1", port=url.port or 80, path_prefix=url.path.encode())
