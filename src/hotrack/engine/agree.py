"""What ranks decide together."""

import torch
import torch.distributed as dist

from hotrack.distributed.tensor_parallel import TensorParallel


def min_over_ranks(tp: TensorParallel, value: int) -> int:
    """The smallest ``value`` of all ranks; every rank must call."""
    if tp.size == 1:
        return value
    smallest = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=tp.group)
    return int(smallest.item())
