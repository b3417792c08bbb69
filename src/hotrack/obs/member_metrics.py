"""Prometheus series of one member. Where the meaning is vLLM's, so is the name, and its dashboards work
unchanged."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hotrack.core.lifecycle import EngineState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("engine", "model_name")
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_TRANSITION = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")

# Gauges the engine reports with each step (``StepOutputs.stats``), and cumulative counts among them.
_GAUGES = {
    "running": ("vllm:num_requests_running", "Requests in the current batch."),
    "waiting": ("vllm:num_requests_waiting", "Requests waiting to be scheduled."),
    "kv_usage": ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
}
_TOTALS = {
    "preemptions": ("vllm:num_preemptions", "Requests preempted to free KV blocks."),
    "prompt_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "cached_prompt_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
}

# What sleep and wake report, and what it is called here.
_BYTES = {
    "freed_bytes": "freed",
    "restored_bytes": "restored",
    "mapped_bytes": "mapped",
    "bytes_copied": "copied",
    "kept_bytes": "kept",
    "rss_before_bytes": "rss_before",
    "rss_after_bytes": "rss_after",
    "device_before_bytes": "device_before",
    "device_after_bytes": "device_after",
}


class MemberMetrics:
    """One registry per server, so two servers fit in one test."""

    def __init__(self, model_name: str) -> None:
        self._registry = registry = CollectorRegistry()
        labels = ("0", model_name)

        def counter(name: str, text: str, extra: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, (*_LABELS, *extra), registry=registry)

        def gauge(name: str, text: str, extra: tuple[str, ...] = ()) -> Gauge:
            return Gauge(name, text, (*_LABELS, *extra), registry=registry)

        def histogram(
            name: str, text: str, buckets: tuple[float, ...], extra: tuple[str, ...] = ()
        ) -> Histogram:
            return Histogram(name, text, (*_LABELS, *extra), registry=registry, buckets=buckets)

        self._labels = labels
        self._gauges = {key: gauge(name, text).labels(*labels) for key, (name, text) in _GAUGES.items()}
        self._totals = {key: counter(name, text).labels(*labels) for key, (name, text) in _TOTALS.items()}
        self._seen: dict[str, float] = dict.fromkeys(_TOTALS, 0.0)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens taken in.").labels(*labels)
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(*labels)
        self._finished = counter(
            "vllm:request_success", "Sequences finished, by reason.", ("finished_reason",)
        )
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _LATENCY
        ).labels(*labels)
        self.token_gap = histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens of one sequence.", _GAP
        ).labels(*labels)
        self.e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _LATENCY).labels(
            *labels
        )
        self.prompt_length = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        ).labels(*labels)
        self.output_length = histogram(
            "vllm:request_generation_tokens", "Generated tokens per sequence.", _TOKENS
        ).labels(*labels)
        self._sleep_state = gauge(
            "vllm:engine_sleep_state", "1 for the state the engine is in.", ("sleep_state",)
        )
        self._transition = histogram(
            "vllm:sleep_mode_operation_duration_seconds",
            "Sleep and wake operations.",
            _TRANSITION,
            ("operation",),
        )
        self._in_flight = gauge(
            "vllm:sleep_mode_operations_in_flight",
            "Sleep and wake operations that have not ended.",
            ("operation",),
        )
        self._phase = gauge(
            "hotrack:sleep_mode_phase_seconds", "Phases of the last sleep and wake.", ("operation", "phase")
        )
        self._bytes = gauge(
            "hotrack:sleep_mode_bytes",
            "Bytes of the last sleep and wake, by what they are.",
            ("operation", "kind"),
        )
        self._cycles = gauge("hotrack:sleep_mode_cycles", "How often the engine has slept.")
        self._host_copy = gauge("hotrack:host_copy_bytes", "Host copy of the weights of one rank.")
        self._missing = gauge("hotrack:missing_bytes", "Bytes that are asleep, by tag.", ("tag",))
        self._responses = counter(
            "hotrack:http_responses", "HTTP responses, by route and status.", ("route", "code")
        )
        self.ignored_fields = counter(
            "hotrack:ignored_request_fields", "Request fields that are in no published API and were ignored."
        ).labels(*labels)
        self.set_sleep_state(EngineState.AWAKE, 0)

    def update_engine(self, stats: Mapping[str, float]) -> None:
        """Take over what the engine reported with a step."""
        for key, gauge in self._gauges.items():
            if key in stats:
                gauge.set(stats[key])
        for key, total in self._totals.items():
            grown = stats.get(key, 0.0) - self._seen[key]
            if grown > 0:
                total.inc(grown)
                self._seen[key] = stats[key]

    def finished(self, reason: str) -> None:
        self._finished.labels(*self._labels, reason).inc()

    def response(self, route: str, status: int) -> None:
        self._responses.labels(*self._labels, route, str(status)).inc()

    def set_sleep_state(self, state: EngineState, level: int) -> None:
        asleep = state in (EngineState.ASLEEP, EngineState.WAKING) and level > 0
        current = _SLEEP_STATES[level] if asleep else "awake"
        for name in _SLEEP_STATES:
            self._sleep_state.labels(*self._labels, name).set(name == current)

    @contextmanager
    def transition(self, operation: str) -> Iterator[None]:
        """Time a 'sleep' or 'wake' that succeeds; count it as in flight meanwhile."""
        in_flight = self._in_flight.labels(*self._labels, operation)
        started = perf_counter()
        with in_flight.track_inprogress():
            yield
        self._transition.labels(*self._labels, operation).observe(perf_counter() - started)

    def report(self, operation: str, report: Mapping[str, Any]) -> None:
        """Take over what a 'sleep' or 'wake' reported, of rank 0. One that changed nothing says nothing, but
        what is missing."""
        for tag, nbytes in report.get("missing_bytes", {}).items():
            self._missing.labels(*self._labels, tag).set(nbytes)
        if not report.get("changed"):
            return
        for key, value in report.items():
            if key.endswith("_ms"):
                self._phase.labels(*self._labels, operation, key.removesuffix("_ms")).set(value / 1e3)
            elif (kind := _BYTES.get(key)) and value is not None:  # a CPU's device has no bytes of its own
                self._bytes.labels(*self._labels, operation, kind).set(value)
        self._cycles.labels(*self._labels).set(report["cycle"])
        self._host_copy.labels(*self._labels).set(report["store_bytes"])

    def render(self) -> bytes:
        return generate_latest(self._registry)
