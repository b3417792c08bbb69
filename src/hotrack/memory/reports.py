"""What a transition did, in bytes and milliseconds; plain data for the control plane."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepReport:
    """``changed`` is False when there was nothing to do (already asleep, or level 0, which touches no
    memory).

    ``copy_ms``: saving mutable tensors; ``unmap_ms``: making regions inaccessible and giving their memory
    back; ``drop_ms``: freeing packed copies and trimming the heap; ``wait_ms``: draining, filled in by the
    engine. ``rss_*``: resident set of this process. ``store_bytes``: what the host stores hold afterwards.
    ``cycle``: how many times this process has slept, this one included. ``bytes_copied``: between device and
    host; ``kept_bytes`` of them are KV that comes back. ``quiesce_ms``: waiting for kernels in flight.
    ``device_*``: what the driver says this process holds on its device, context included; None where nobody
    knows.
    """

    level: int
    changed: bool
    tags: tuple[str, ...]
    freed_bytes: int
    store_bytes: int
    rss_before_bytes: int
    rss_after_bytes: int
    cycle: int
    bytes_copied: int = 0
    kept_bytes: int = 0
    device_before_bytes: int | None = None
    device_after_bytes: int | None = None
    wait_ms: float = 0.0
    quiesce_ms: float = 0.0
    copy_ms: float = 0.0
    drop_ms: float = 0.0
    unmap_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeReport:
    """``changed`` is False when every region asked for was awake already.

    ``map_ms``, ``copy_ms`` and ``verify_ms`` are summed over the copying threads, which overlap each other
    and the packing. On a GPU ``copy_ms`` is from the first copy to the end of the last, ``map_ms`` lies
    within it, and ``verify_ms`` is what checksums took beyond it. ``prepack_ms`` is the time spent in
    ``PackedCopies.pack``; ``reload_ms``: the weight loader after level 2. ``total_ms`` is the time the
    caller waited.
    """

    changed: bool
    tags: tuple[str, ...]
    restored_bytes: int
    mapped_bytes: int
    store_bytes: int
    rss_before_bytes: int
    rss_after_bytes: int
    cycle: int
    bytes_copied: int = 0
    device_before_bytes: int | None = None
    device_after_bytes: int | None = None
    map_ms: float = 0.0
    copy_ms: float = 0.0
    verify_ms: float = 0.0
    prepack_ms: float = 0.0
    reload_ms: float = 0.0
    total_ms: float = 0.0
