"""The KV of running requests as byte ranges, for a sleep that keeps them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotrack.memory.kept import KeptRange


def live_rows(blocks: Sequence[NDArray[np.int64]], storage: Sequence[Tensor]) -> list[KeptRange]:
    """A range per run of neighbouring blocks. ``blocks[g]``: ascending blocks of group g; ``storage[g]``: its
    packed rows, uint8 [num_blocks, row_bytes]."""
    found = []
    for mine, rows in zip(blocks, storage, strict=True):
        size = rows.shape[1]
        for run in np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1):
            if len(run):
                found.append(KeptRange(rows, int(run[0]) * size, len(run) * size))
    return found
