"""What every member of a device group holds, and whether another one fits beside that."""

from collections.abc import Mapping

from hotrack.core.lifecycle import MemberState
from hotrack.plan.ledger import Verdict, measured, stated
from hotrack.pool.capacity import Capacity
from hotrack.pool.entry import Entry
from hotrack.pool.scheduler import DOWN_STATES

_S = MemberState
RESTING = frozenset({_S.DRAINING, _S.SUSPENDING, _S.ASLEEP})  # the ledger counts only their residue


class MemoryBook:
    """``capacity`` grows wiser with every measurement."""

    def __init__(self, entries: Mapping[str, Entry], capacity: Capacity) -> None:
        self._entries = entries
        self.capacity = capacity
        self._foreign_bytes = capacity.shares().get("foreign", 0)  # as last read

    def measured(self, name: str, kind: str, num_bytes: int) -> None:
        """``kind``: 'awake', 'residue', or 'partial' for a sleeper that could give back more."""
        entry = self._entries[name]
        entry.memory_bytes = num_bytes
        if kind == "residue":
            entry.residue_bytes = num_bytes
            self.capacity = self.capacity.with_residue(name, measured(num_bytes))
        elif kind == "awake":
            entry.awake_bytes = max(num_bytes, entry.awake_bytes or 0)
            if num_bytes > (entry.spec.awake_bytes or 0):  # a declared bound stays until it is exceeded
                self.capacity = self.capacity.with_awake(name, measured(entry.awake_bytes))

    def launched(self, name: str) -> None:
        """What an earlier process left asleep says nothing about the new one."""
        entry = self._entries[name]
        entry.residue_bytes = None
        self.capacity = self.capacity.with_residue(name, stated(entry.spec.residue_bytes))

    def used(self, num_bytes: int) -> None:
        """What the device says is used; what no member holds of it is foreign. Members were read a moment
        earlier and may have grown since, so only what two readings agree on counts."""
        foreign = max(0, num_bytes - sum(entry.memory_bytes or 0 for entry in self._entries.values()))
        agreed, self._foreign_bytes = min(foreign, self._foreign_bytes), foreign
        self.capacity = self.capacity.with_foreign(measured(agreed))

    def fits(self, name: str) -> Verdict:
        """Does ``name`` fit beside who is awake, if all others sleep as deep as they can?"""
        members = [entry.view() for entry in self._entries.values()]
        up = {m.name for m in members if m.state is _S.READY or m.stuck} | {name}
        return self.capacity.fits(up, absent={m.name for m in members if m.absent} - {name})

    def lacking(self, name: str) -> int | None:
        """Bytes that must go so that ``name`` fits beside what everybody holds now; None: not known."""
        entry = self._entries[name]
        unknown = entry.awake_bytes is None and entry.spec.awake_bytes is None
        cold = entry.state in DOWN_STATES  # it sizes itself by what it finds free
        if unknown or cold or not self.capacity.counts_bytes:
            return None
        others = [other for other in self._entries.values() if other is not entry]
        return sum(map(reserve, others)) - self.fits(name).spare_bytes

    def reserves(self) -> list[str]:
        """Sleepers that hold more than their residue, the largest first."""
        sleepers = [entry for entry in self._entries.values() if entry.state is _S.ASLEEP]
        holding = [entry for entry in sleepers if reserve(entry) > entry.spec.tolerance_bytes]
        return [entry.name for entry in sorted(holding, key=reserve, reverse=True)]


def reserve(entry: Entry) -> int:
    """Bytes that a member which is not in use holds beyond its residue."""
    if entry.state not in RESTING or entry.memory_bytes is None:
        return 0
    residue = entry.spec.residue_bytes if entry.residue_bytes is None else entry.residue_bytes
    return max(0, entry.memory_bytes - (residue or 0))
