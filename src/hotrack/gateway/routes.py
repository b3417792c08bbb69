"""Names a client may use, and what each means."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotrack.gateway.request import Route


@dataclass(frozen=True, slots=True)
class Routes:
    """``by_name``: ids and aliases; ``listed``: the ids that ``/v1/models`` and error messages show."""

    by_name: Mapping[str, Route] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)
