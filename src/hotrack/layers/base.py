"""What layers are built from."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.base import Ops
from hotrack.kernels.reference.linear import LinearKernel
from hotrack.layers.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Build:
    """Passed to every constructor: kernels, this rank's place, and the dtype of weights and activations."""

    ops: Ops
    tp: TensorParallel
    dtype: torch.dtype


class Layer(nn.Module):
    """A module whose parameters are declared before they have memory.

    Constructors run under ``torch.device("meta")``. Once the parameters are placed, :meth:`bind` makes what refers to
    their memory.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.tp = build.tp
        self.dtype = build.dtype

    def declare(self, *shape: int) -> nn.Parameter:
        """A parameter of this shape and the model's dtype."""
        return nn.Parameter(torch.empty(shape, dtype=self.dtype), requires_grad=False)

    def shards(self, name: str) -> tuple[Shard, ...]:
        """What fills parameter ``name`` of this layer on this rank."""
        return WHOLE

    def bind(self) -> None:
        """Called once when every parameter has its memory."""

    def kernels(self) -> Iterator[tuple[str, LinearKernel]]:
        """(parameter name, kernel) of each matrix this layer multiplies by."""
        return iter(())


def bias_of(bias: nn.Parameter | None) -> Tensor | None:
    """The parameter as the tensor a kernel takes."""
    return None if bias is None else bias.data
