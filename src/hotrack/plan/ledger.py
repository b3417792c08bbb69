"""GpuLedger: does a set of awake members fit on a device? Integer arithmetic on terms of known origin.

    pool_a + nonpool_a + sum(residue_s for sleepers s) + foreign + margin <= total

``pool`` is what the engine manages itself (weights and KV), ``nonpool`` what its process holds besides
(contexts, communicators, workspaces), ``residue`` what a sleeper still holds, ``foreign`` is other people's
memory. On a CPU the device is a budget of resident memory and the arithmetic is the same. With several
members awake their pool and nonpool terms add up.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar

from hotrack.core.errors import ConfigError

GIB = 1 << 30
MIB = 1 << 20


class Provenance(StrEnum):
    ASSUMED = "assumed"
    MEASURED = "measured"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Term:
    """A number of bytes and where it comes from."""

    num_bytes: int
    provenance: Provenance

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} ({self.provenance})"


def assumed(num_bytes: int) -> Term:
    return Term(num_bytes, Provenance.ASSUMED)


def measured(num_bytes: int) -> Term:
    return Term(num_bytes, Provenance.MEASURED)


def operator(num_bytes: int) -> Term:
    return Term(num_bytes, Provenance.OPERATOR)


NOTHING = Term(0, Provenance.OPERATOR)


@dataclass(frozen=True, slots=True)
class Footprint:
    """One member on one device: what it holds awake (``pool`` + ``nonpool``) and asleep (``residue``)."""

    name: str
    pool: Term
    nonpool: Term = NOTHING
    residue: Term = NOTHING

    @property
    def awake_bytes(self) -> int:
        return self.pool.num_bytes + self.nonpool.num_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """``spare_bytes`` may be negative. ``arithmetic`` is the whole sum in words; ``warnings`` name terms
    that were never measured."""

    fits: bool
    need_bytes: int
    total_bytes: int
    arithmetic: str
    warnings: tuple[str, ...] = ()

    @property
    def spare_bytes(self) -> int:
        return self.total_bytes - self.need_bytes


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """What the members of a device group may use together on each of its devices."""

    total_bytes: int
    foreign: Term = NOTHING
    margin: Term = NOTHING
    device: str = "device"

    def __post_init__(self) -> None:
        if self.total_bytes <= 0:
            raise ConfigError(f"the budget of {self.device} must be positive, got {self.total_bytes} bytes")


@dataclass(frozen=True, slots=True)
class GpuLedger:
    """All terms of one device. Frozen: a measurement makes a new ledger (``with_residue``,
    ``with_awake``).
    """

    budget: DeviceBudget
    footprints: Mapping[str, Footprint]
    counts_bytes: ClassVar[bool] = True

    @classmethod
    def of(cls, budget: DeviceBudget, footprints: Iterable[Footprint]) -> "GpuLedger":
        return cls(budget, {footprint.name: footprint for footprint in footprints})

    def fits(self, awake: Collection[str], *, absent: Collection[str] = ()) -> Verdict:
        """Verdict on ``awake`` being awake while everyone else sleeps; ``absent`` members hold nothing (no
        process).
        """
        terms: list[tuple[str, Term]] = []
        for name in sorted(self.footprints):
            footprint = self.footprints[name]
            if name in awake:
                terms += [(f"pool {name}", footprint.pool), (f"nonpool {name}", footprint.nonpool)]
            elif name not in absent:
                terms.append((f"residue {name}", footprint.residue))
        terms += [("foreign", self.budget.foreign), ("margin", self.budget.margin)]
        need = sum(term.num_bytes for _, term in terms)
        spare = self.budget.total_bytes - need
        shown = [f"{label} {term}" for label, term in terms if term.num_bytes]
        ending = f"{format_bytes(spare)} spare" if spare >= 0 else f"{format_bytes(-spare)} too much"
        arithmetic = (
            f"{' + '.join(shown) or '0'} = {format_bytes(need)} "
            f"of {format_bytes(self.budget.total_bytes)} on {self.budget.device}: {ending}"
        )
        warnings = tuple(
            f"unmeasured {label}: {format_bytes(term.num_bytes)} is an assumption; write what "
            f"`hotrack ps` shows later under the model's `memory`"
            for label, term in terms
            if term.provenance is Provenance.ASSUMED
        )
        return Verdict(spare >= 0, need, self.budget.total_bytes, arithmetic, warnings)

    def max_pool_bytes(self, name: str, *, absent: Collection[str] = ()) -> int:
        """Largest ``pool`` with which ``name`` could be awake alone; as a share of the total it is vLLM's
        largest
        ``gpu_memory_utilization``. Negative: not even an empty pool fits."""
        alone = self.fits((name,), absent=absent)
        return self.footprints[name].pool.num_bytes + alone.spare_bytes

    def check_each_alone(self) -> tuple[str, ...]:
        """Warnings of the plan in which each member is awake alone.

        Raises:
            ConfigError: a member can never be awake; the message carries the arithmetic and the largest pool
            it may have.
        """
        warnings: dict[str, None] = {}
        for name in self.footprints:
            verdict = self.fits((name,))
            if not verdict.fits:
                largest = format_bytes(max(0, self.max_pool_bytes(name)))
                raise ConfigError(
                    f"member {name!r} cannot be awake even with every other member asleep: "
                    f"{verdict.arithmetic}; its pool may be at most {largest}"
                )
            warnings.update(dict.fromkeys(verdict.warnings))
        return tuple(warnings)

    def with_residue(self, name: str, residue: Term) -> "GpuLedger":
        return self._with(replace(self.footprints[name], residue=residue))

    def with_awake(self, name: str, awake: Term) -> "GpuLedger":
        """A process total seen from outside: pool and nonpool cannot be told apart, so all of it counts as
        pool.
        """
        return self._with(replace(self.footprints[name], pool=awake, nonpool=NOTHING))

    def with_foreign(self, foreign: Term) -> "GpuLedger":
        return replace(self, budget=replace(self.budget, foreign=foreign))

    def shares(self) -> dict[str, int]:
        """Bytes of the device that are not the members' doing: 'total', 'foreign', 'margin'."""
        budget = self.budget
        return {
            "total": budget.total_bytes,
            "foreign": budget.foreign.num_bytes,
            "margin": budget.margin.num_bytes,
        }

    def _with(self, footprint: Footprint) -> "GpuLedger":
        return replace(self, footprints={**self.footprints, footprint.name: footprint})


def stated(num_bytes: int | None) -> Term:
    """What is declared counts as the operator's word; what is not is assumed to be nothing until measured."""
    return assumed(0) if num_bytes is None else operator(num_bytes)


def format_bytes(num_bytes: int) -> str:
    """Two decimals of GiB from 1 GiB up, else whole MiB (one decimal below 10)."""
    if abs(num_bytes) >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    size = num_bytes / MIB
    return f"{size:.0f} MiB" if size == 0 or abs(size) >= 10 else f"{size:.1f} MiB"
