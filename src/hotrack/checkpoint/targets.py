"""What a model asks of the loader: which part of which checkpoint tensor fills which part of a parameter."""

from dataclasses import dataclass

from torch import Tensor

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One checkpoint tensor (or a part of it) and its place in a parameter.

    name      name in the checkpoint (Hugging Face spelling)
    dest      where in the parameter, as in ``param[dest]``; ``()`` is all of it. An int drops a dimension
              (one expert of a stack)
    select    which part of the checkpoint tensor, as in ``tensor[select]``; ``()`` is all of it. Slices only,
              step 1 (a tensor-parallel shard); only the selected rows are read from disk
    optional  leave the parameter's bytes alone when the checkpoint has no such tensor
    add       added to every element, in the parameter's dtype (norms that are published around 0)

    ``tensor[select]`` must have exactly the shape of ``param[dest]``.
    """

    name: str
    dest: Index = ()
    select: tuple[slice, ...] = ()
    optional: bool = False
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a parameter that stays quantised: a parameter of its own.

    name   of that parameter
    param  float32, or uint8 for E8M0 bytes, [..., ceil(rows / block[0]), ceil(columns / block[1])] for a
           weight of [..., rows, columns] values
    block  (rows, columns) that share a scale; (1, 32) for MXFP4
    """

    name: str
    param: Tensor
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A parameter (or a view into a planned region) and what fills it. The dtype of ``param`` decides: values
    are converted to it, and quantised ones dequantised.

    With ``scales``, ``param`` keeps quantised values: float8_e4m3fn for FP8, uint8 [..., rows, columns / 2]
    for MXFP4. They and their scales are those published when the checkpoint has the same format, else they
    are made while it is read.
    """

    param: Tensor
    sources: tuple[Source, ...]
    scales: Scales | None = None
