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
class LoadTarget:
    """A parameter (or a view into a planned region) and what fills it. The dtype of ``param`` decides."""

    param: Tensor
    sources: tuple[Source, ...]
