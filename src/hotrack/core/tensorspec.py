"""A tensor before it exists: what a model declares and the memory layer places (no torch)."""

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "int8": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """``dtype`` is torch's name without the prefix, e.g. 'bfloat16'."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]
