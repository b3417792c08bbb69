"""Connections to members, by name."""

from urllib.parse import urlsplit

from hotrack.gateway.upstream import Address, MemberConnections
from hotrack.members.endpoint import Endpoint


class Upstreams:
    """One ``MemberConnections`` per member, for as long as it listens at the same place."""

    def __init__(self) -> None:
        self._by_member: dict[str, tuple[Endpoint, MemberConnections]] = {}

    def of(self, member: str, endpoint: Endpoint) -> MemberConnections:
        known = self._by_member.get(member)
        if known is not None and known[0] == endpoint:
            return known[1]
        if known is not None:  # restarted somewhere else
            known[1].close()
        connections = MemberConnections(to_address(endpoint))
        self._by_member[member] = (endpoint, connections)
        return connections


def to_address(endpoint: Endpoint) -> Address:
    if endpoint.uds is not None:
        return Address(uds=str(endpoint.uds))
    url = urlsplit(endpoint.base_url)
    return Address(host=url.hostname or "127.0.0.1", port=url.port or 80, path_prefix=url.path.encode())
