"""What ``ps`` shows."""

from dataclasses import dataclass

from hotrack.core.lifecycle import MemberState


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One member as last observed. Bytes are measured on ``device`` ("host": resident memory); times are
    medians of what was measured, ``wake_s`` and ``start_s`` until ready. None: not yet."""

    name: str
    aliases: tuple[str, ...]
    state: MemberState
    device_group: str
    device: str
    endpoint: str
    pid: int | None
    memory_bytes: int | None
    awake_bytes: int | None
    residue_bytes: int | None
    num_waiting: int
    num_in_flight: int
    num_cycles: int
    wake_s: float | None
    sleep_s: float | None
    start_s: float | None
    idle_s: float
    ttl_s: float
    last_error: str
    retry_in_s: float | None
