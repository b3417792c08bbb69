"""Planned regions of device memory that can sleep and wake without moving.

Role: every byte an engine keeps on its device lives in a ``Region``: a virtual range reserved for ever, with
physical chunks mapped behind it. Sleep takes the chunks away, wake brings them back from a ``HostStore``, and
tensors stay the same objects at the same address throughout. ``MemoryManager`` is what the engine uses.

Owner of state: the engine's control path; one transition at a time. Chunk copies run on a small thread pool
inside one call. Regions are not inherited by forked children (``MADV_DONTFORK``): a copy in a child would
keep pages alive that sleep promised to give back. Start ranks as new programs.

Does not belong here: what tensors mean, when to sleep, draining requests.
"""

from hotrack.memory.backend import PhysicalBackend
from hotrack.memory.kept import KeptRange
from hotrack.memory.machine import SharedCopy
from hotrack.memory.manager import MemoryManager
from hotrack.memory.region import Region
from hotrack.memory.reports import SleepReport, WakeReport
from hotrack.memory.sleeper import PackedCopies, Sleeper
from hotrack.memory.store import FileStore, HostStore

__all__ = [
    "FileStore",
    "HostStore",
    "KeptRange",
    "MemoryManager",
    "PackedCopies",
    "PhysicalBackend",
    "Region",
    "SharedCopy",
    "SleepReport",
    "Sleeper",
    "WakeReport",
]
