"""What may be awake together: by a memory budget, or one at a time when there is none. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hotrack.plan.ledger import GpuLedger, Term, Verdict


class Capacity(Protocol):
    """``counts_bytes``: verdicts are sums of bytes, not of heads."""

    @property
    def counts_bytes(self) -> bool: ...

    def fits(self, awake: Collection[str], *, absent: Collection[str] = ()) -> Verdict: ...

    def with_residue(self, name: str, residue: Term) -> "Capacity": ...

    def with_awake(self, name: str, awake: Term) -> "Capacity": ...

    def with_foreign(self, foreign: Term) -> "Capacity": ...

    def shares(self) -> dict[str, int]:
        """Bytes of the device: 'total', 'foreign', 'margin'; empty where nobody counts."""
        ...


@dataclass(frozen=True, slots=True)
class OneAtATime:
    """Without a budget, one awake member has the whole device."""

    counts_bytes: ClassVar[bool] = False

    def fits(self, awake: Collection[str], *, absent: Collection[str] = ()) -> Verdict:
        del absent
        names = ", ".join(sorted(awake)) or "nobody"
        return Verdict(len(awake) <= 1, len(awake), 1, f"one member at a time has the device, not {names}")

    def with_residue(self, name: str, residue: Term) -> "OneAtATime":
        del name, residue
        return self

    def with_awake(self, name: str, awake: Term) -> "OneAtATime":
        del name, awake
        return self

    def with_foreign(self, foreign: Term) -> "OneAtATime":
        del foreign
        return self

    def shares(self) -> dict[str, int]:
        return {}


def ledger_capacity(ledger: GpuLedger | None) -> Capacity:
    return OneAtATime() if ledger is None else ledger
