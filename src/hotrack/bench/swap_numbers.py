"""Arithmetic of the swap benchmark: spreads over cycles, slopes, leaks, and bars."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
RSS_LIMIT_BYTES = 1024.0
JUDGED_CYCLES = 50


@dataclass(frozen=True, slots=True)
class Series:
    """Milliseconds of one operation over the cycles. The first stands alone: an allocator that pays in its
    first cycle looks good in any average."""

    first: float
    median: float
    p95: float
    worst: float
    count: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> "Series":
        """p95 by nearest rank: a value that was measured, and the worst of fewer than 20."""
        ordered = sorted(milliseconds)
        rank = -(-95 * len(ordered) // 100) - 1
        return cls(milliseconds[0], median(ordered), ordered[rank], ordered[-1], len(ordered))


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares over equally spaced values: change per step, and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Slope":
        """Zero for fewer than three values: two points tell nothing about an error."""
        count = len(values)
        if count < 3:
            return cls(0.0, 0.0)
        mean_x, mean_y = (count - 1) / 2, sum(values) / count
        spread = sum((x - mean_x) ** 2 for x in range(count))
        value = sum((x - mean_x) * (y - mean_y) for x, y in enumerate(values)) / spread
        rest = sum((y - mean_y - value * (x - mean_x)) ** 2 for x, y in enumerate(values))
        return cls(value, sqrt(rest / (count - 2) / spread))


def changes(values: Sequence[Hashable]) -> int:
    """How many of the values differ from the first."""
    return sum(value != values[0] for value in values)


@dataclass(frozen=True, slots=True)
class Leak:
    """One thing that may not grow over the cycles. ``exact``: it must be the same every time (in ``changed``
    cycles it was not); else it fails when it grows by more than ``limit`` per cycle, by two standard errors
    (None: too few cycles to tell)."""

    what: str
    first: float
    last: float
    per_cycle: Slope
    changed: int
    exact: bool
    limit: float | None = None

    @property
    def passed(self) -> bool:
        if self.exact:
            return self.changed == 0
        return self.limit is None or self.per_cycle.value - 2 * self.per_cycle.error < self.limit

    @classmethod
    def of(cls, what: str, values: Sequence[float]) -> "Leak":
        return cls(what, values[0], values[-1], Slope.of(values), changes(values), exact=True)

    @classmethod
    def growing(cls, what: str, values: Sequence[float], limit: float, stride: int = 1) -> "Leak":
        """``values``: read in every ``stride``-th cycle. The slope counts from the second tenth on: at first
        the interpreter and libraries settle."""
        settled = Slope.of(values[len(values) // 10 :])
        per_cycle = Slope(settled.value / stride, settled.error / stride)
        judged = limit if len(values) >= JUDGED_CYCLES else None
        return cls(what, values[0], values[-1], per_cycle, changes(values), exact=False, limit=judged)


def leaks(states: Sequence[dict[str, Any]], where: str, stride: int = 1) -> list[Leak]:
    """From the ``stats`` answers of one place in the cycle. The resident set, which only every ``stride``-th
    has, is noisy: its slope counts."""
    resident = [state["rss_bytes"] for state in states[::stride]]
    found = [Leak.growing(f"RSS {where}", resident, RSS_LIMIT_BYTES, stride)]
    for key, name in (("device_bytes", "device bytes"), ("host_bytes", "host copy")):
        if all(state[key] is not None for state in states):
            found.append(Leak.of(f"{name} {where}", [state[key] for state in states]))
    kinds = sorted({kind for state in states for kind in state["handles"]})
    found += [
        Leak.of(f"{kind} {where}", [state["handles"].get(kind, 0) for state in states]) for kind in kinds
    ]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table: ``value`` (a median, if there are several), and of the cycles the first and the
    95th percentile. ``bar``: what neither ``value`` nor ``first`` may exceed; None: shown for comparison."""

    subject: str
    what: str
    value: float
    unit: str
    first: float | None = None
    p95: float | None = None
    floor: float | None = None
    bar: float | None = None
    note: str = ""

    @classmethod
    def of(
        cls,
        subject: str,
        what: str,
        series: Series,
        *,
        floor: float | None = None,
        bar: float | None = None,
        note: str = "",
    ) -> "Row":
        return cls(
            subject=subject,
            what=what,
            value=series.median,
            unit="ms",
            first=series.first,
            p95=series.p95,
            floor=floor,
            bar=bar,
            note=note,
        )

    @property
    def ratio(self) -> float | None:
        return self.value / self.floor if self.floor else None

    @property
    def passed(self) -> bool | None:
        return None if self.bar is None else max(self.value, self.first or 0.0) <= self.bar
