"""Steps of recurrent layers without a model: how many new tokens, and where the states are."""

import torch

from hotrack.kernels.recurrent import StatePlan


def state_plan(rows: list[int], lens: list[int], fresh: list[bool]) -> StatePlan:
    """Sequences with one token first; ``rows``: of the state tensors, read and written."""
    where = torch.tensor(rows)
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    decodes = next((i for i, n in enumerate(lens) if n > 1), len(lens))
    return StatePlan(where, where, torch.tensor(fresh), starts, lens, decodes)
