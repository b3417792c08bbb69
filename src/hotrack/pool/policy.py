"""How a pool shares its devices. Every default is stated here and nowhere else."""

from dataclasses import dataclass

from hotrack.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """Fairness, bounds and failure handling of one device group.

    A member keeps the device while it has work, until another member's request is due:
    ``max_batch_requests`` admitted or ``max_residency_s`` passed since it became ready (the quantum), or the
    other's oldest request has waited ``max_wait_s``, or the other's request has a strictly better priority.
    It keeps the device for ``min_residency_s`` in any case, unless a request's deadline would be missed.

    ``max_queue``: requests waiting per member. ``max_queue_wait_s``: a request that waits longer gets a 504.
    ``ageing_s``: waiting this long is worth one step of priority inside a member's queue.
    ``max_failures``: consecutive failures before a member is quarantined. ``backoff_s`` doubles per failure.
    ``boot``: start every member once at pool start (start, verify, sleep), so that later waits are only
    wakes.
    """

    min_residency_s: float = 1.0
    max_residency_s: float = 60.0
    max_batch_requests: int = 256
    max_wait_s: float = 10.0
    max_queue: int = 512
    max_queue_wait_s: float = 600.0
    ageing_s: float = 30.0
    abort_grace_s: float = 1.0
    poll_s: float = 0.02
    probe_interval_s: float = 5.0
    backoff_s: float = 1.0
    max_backoff_s: float = 300.0
    max_failures: int = 3
    boot: bool = True

    def __post_init__(self) -> None:
        positive = (
            "max_residency_s",
            "max_queue_wait_s",
            "ageing_s",
            "poll_s",
            "probe_interval_s",
            "backoff_s",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("min_residency_s", "max_wait_s", "abort_grace_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("max_batch_requests", "max_queue", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_residency_s < self.min_residency_s:
            raise ConfigError(
                f"max_residency_s ({self.max_residency_s:g}) is less than "
                f"min_residency_s ({self.min_residency_s:g})"
            )

    def backoff_after(self, failures: int) -> float:
        """Seconds before the next attempt after that many consecutive failures (>= 1)."""
        return float(min(self.max_backoff_s, self.backoff_s * 2 ** (min(failures, 32) - 1)))
