"""Which part of a checkpoint tensor a rank's parameter holds."""

from dataclasses import dataclass

from hotrack.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """``param[dest] = tensor[select] + add`` for the checkpoint tensor ``part`` ('' when the parameter has
    only one).

    ``()`` means all of it; an int in ``dest`` drops that dimension.
    """

    part: str = ""
    dest: tuple[int | slice, ...] = ()
    select: tuple[slice, ...] = ()
    add: float = 0.0


WHOLE = (Shard(),)


def divide(count: int, size: int, what: str) -> int:
    """``count / size``; ConfigError when it is not an integer."""
    if count % size:
        raise ConfigError(
            f"--tensor-parallel-size {size} cannot split {count} {what}; choose a divisor of {count}",
            param="tensor_parallel_size",
        )
    return count // size


def span(index: int, length: int) -> slice:
    """The ``index``-th run of ``length``."""
    return slice(index * length, (index + 1) * length)
