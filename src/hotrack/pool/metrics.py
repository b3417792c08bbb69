"""Prometheus series of a pool, fed by its events; gauges are read from ``status`` when scraped."""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hotrack.core.lifecycle import MemberState
from hotrack.pool.capacity import Capacity
from hotrack.pool.events import (
    CanaryRan,
    Event,
    RequestAdmitted,
    RequestRefused,
    StateChanged,
    SwapDone,
    SwapRecord,
)
from hotrack.pool.status import MemberStatus

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
PHASES = ("drain", "sleep", "start", "wake", "verify")


class PoolMetrics:
    """Own registry, so that two pools live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._state = Gauge(
            "pool_member_state", "1 for the state a member is in", ["member", "state"], registry=registry
        )
        self._swaps = Counter(
            "pool_swaps", "Transitions", ["from", "to", "cause", "result"], registry=registry
        )
        self._transition = Histogram(
            "pool_transition_seconds",
            "Seconds of each phase of a transition",
            ["member", "phase"],
            buckets=SECONDS,
            registry=registry,
        )
        self._depth = Gauge("pool_queue_depth", "Requests waiting", ["member"], registry=registry)
        self._in_flight = Gauge("pool_in_flight", "Requests running", ["member"], registry=registry)
        self._wait = Histogram(
            "pool_queue_wait_seconds",
            "Wait of requests that had to queue",
            ["member"],
            buckets=SECONDS,
            registry=registry,
        )
        self._requests = Counter(
            "pool_requests", "Requests that ended, by code", ["member", "code"], registry=registry
        )
        self._bytes = Gauge(
            "pool_gpu_bytes", "Measured device bytes of a member", ["member", "kind"], registry=registry
        )
        self._device = Gauge(
            "pool_device_bytes", "What a device group shares", ["group", "kind"], registry=registry
        )
        self._canary = Counter("pool_canary", "Canary runs", ["member", "result"], registry=registry)
        self._cycles = Counter("pool_member_cycles", "Sleeps completed", ["member"], registry=registry)

    def observe(self, event: Event) -> None:
        """Count one event."""
        match event:
            case SwapDone(swap=swap):
                self._observe_swap(swap)
            case StateChanged(member=member, old=MemberState.SUSPENDING, new=MemberState.ASLEEP):
                self._cycles.labels(member).inc()
            case CanaryRan(member=member, result=result):
                self._canary.labels(member, result).inc()
            case RequestAdmitted(member=member, waited_s=waited_s):
                self._wait.labels(member).observe(waited_s)
            case RequestRefused(member=member, code=code):
                self._requests.labels(member, code).inc()
            case _:
                pass

    def count_request(self, member: str, code: str) -> None:
        """A granted request ended, once for each; ``code``: HTTP status, or the error code it ended with
        (``drain_timeout`` for one that was cut).
        """
        self._requests.labels(member, code).inc()

    def render(
        self, status: Sequence[MemberStatus], capacities: Mapping[str, Capacity] | None = None
    ) -> bytes:
        """Prometheus text format. ``capacities``: per device group."""
        for group, capacity in (capacities or {}).items():
            for share, num_bytes in capacity.shares().items():
                self._device.labels(group, share).set(num_bytes)
        for row in status:
            for state in MemberState:
                self._state.labels(row.name, state).set(row.state is state)
            self._depth.labels(row.name).set(row.num_waiting)
            self._in_flight.labels(row.name).set(row.num_in_flight)
            for kind, value in (
                ("held", row.memory_bytes),
                ("pool", row.awake_bytes),
                ("residue", row.residue_bytes),
            ):
                if value is not None:
                    self._bytes.labels(row.name, kind).set(value)
        return generate_latest(self.registry)

    def _observe_swap(self, swap: SwapRecord) -> None:
        source = ",".join(swap.victims)
        self._swaps.labels(source, swap.target or "", swap.cause, swap.result).inc()
        member = swap.target or source
        for phase in PHASES:
            if milliseconds := getattr(swap, f"{phase}_ms"):
                self._transition.labels(member, phase).observe(milliseconds / 1e3)
