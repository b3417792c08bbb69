"""What layers are built from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.base import Kernel, Ops
from hotrack.layers.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Build:
    """Passed to every constructor: kernels, this rank's place, and the dtype of weights and activations."""

    ops: Ops
    tp: TensorParallel
    dtype: torch.dtype


class Layer(nn.Module):
    """A module whose parameters are declared before they have memory.

    Constructors run under ``torch.device("meta")``. Once the parameters are placed, :meth:`bind` makes
    what refers to their memory.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.ops = build.ops
        self.tp = build.tp
        self.dtype = build.dtype

    def __call__(self, *args: Any) -> Any:
        """``forward`` without torch's hook machinery, which costs as much as a small kernel."""
        return self.forward(*args)

    def declare(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """A parameter of this shape and dtype (None: the model's)."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype), requires_grad=False)

    def shards(self, name: str) -> tuple[Shard, ...]:  # noqa: ARG002
        """What fills parameter ``name`` of this layer on this rank."""
        return WHOLE

    def bind(self) -> None:
        """Called once when every parameter has its memory."""

    def kernels(self) -> Iterator[tuple[str, Kernel]]:
        """(parameter name, kernel) of each parameter that a kernel is bound to."""
        return iter(())


def bias_of(bias: nn.Parameter | None) -> Tensor | None:
    """The parameter as the tensor a kernel takes."""
    return None if bias is None else bias.data
