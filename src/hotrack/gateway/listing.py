"""How members look from outside: ``/v1/models``, ``/running``, swaps and events as JSON values."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hotrack.config.pool import ModelConfig, PoolConfig
from hotrack.core.lifecycle import MemberState
from hotrack.core.rounding import rounded
from hotrack.pool.events import Event, SwapRecord
from hotrack.pool.status import MemberStatus

# Words that clients of model routers already look for.
_STATUS = {
    MemberState.READY: "loaded",
    MemberState.DRAINING: "loaded",
    MemberState.ASLEEP: "asleep",
    MemberState.STOPPED: "unloaded",
    MemberState.STARTING: "loading",
    MemberState.VERIFYING: "loading",
    MemberState.WAKING: "loading",
    MemberState.SUSPENDING: "unloading",
    MemberState.FAILED: "failed",
    MemberState.QUARANTINED: "failed",
    MemberState.UNKNOWN: "unknown",
}


class Listing:
    """Static facts of the pool file joined with the members' state."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._created = int(time.time())

    def models(self, states: Mapping[str, MemberState]) -> dict[str, Any]:
        """Body of ``/v1/models``: every listed member, whatever its state."""
        data: list[dict[str, Any]] = []
        for name, model in self._config.models.items():
            if model.unlisted:
                continue
            aliases = model.aliases if self._config.include_aliases else ()
            data += [self._card(entry, name, model, states[name]) for entry in (name, *aliases)]
        return {"object": "list", "data": data}

    def _card(self, entry: str, name: str, model: ModelConfig, state: MemberState) -> dict[str, Any]:
        card: dict[str, Any] = {
            "id": entry,
            "object": "model",
            "created": self._created,
            "owned_by": "hotrack",
            "status": _STATUS[state],
        }
        optional = {
            "name": model.name,
            "description": model.description,
            "aliases": list(model.aliases) if entry == name else None,
            "metadata": model.metadata,
            "capabilities": model.capabilities,
        }
        return card | {key: value for key, value in optional.items() if value}

    def running(self, status: list[MemberStatus]) -> dict[str, Any]:
        """Body of ``/running``. Command lines are left out: they may hold secrets."""
        rows = [
            {
                "model": row.name,
                "state": str(row.state),
                "ttl": row.ttl_s,
                "name": self._config.models[row.name].name,
                "description": self._config.models[row.name].description,
                "pid": row.pid,
                "memory_bytes": row.memory_bytes,
                "waiting": row.num_waiting,
                "in_flight": row.num_in_flight,
            }
            for row in status
            if row.state not in (MemberState.STOPPED, MemberState.UNKNOWN)
        ]
        return {"running": rows}


def status_json(row: MemberStatus) -> dict[str, Any]:
    """One line of ``/api/pool/members``; where it listens is nobody's business."""
    shown: dict[str, Any] = rounded(asdict(row))
    del shown["endpoint"]
    return shown


def swap_json(swap: SwapRecord) -> dict[str, Any]:
    facts = asdict(swap)
    number, victims, target = (facts.pop(key) for key in ("number", "victims", "target"))
    shown: dict[str, Any] = rounded(
        {"number": number, "from": victims, "to": target, "total_ms": swap.total_ms, **facts}
    )
    return shown


def event_json(event: Event) -> dict[str, Any]:
    body = rounded(asdict(event))
    swap = getattr(event, "swap", None)
    if isinstance(swap, SwapRecord):
        body["swap"] = swap_json(swap)
    return {"type": type(event).__name__, **body}
