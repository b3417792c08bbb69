"""Bytes of one published matrix in each format."""

from typing import NamedTuple

MXFP4_GROUP = 32


class Size(NamedTuple):
    """``parameters`` do not count scales; ``num_bytes`` do."""

    parameters: int
    num_bytes: int

    def __mul__(self, count: object) -> "Size":  # ``count`` such matrices
        if not isinstance(count, int):
            return NotImplemented
        return Size(self.parameters * count, self.num_bytes * count)


def plain(parameters: int, element_bytes: int) -> Size:
    """Elements of ``element_bytes`` each."""
    return Size(parameters, parameters * element_bytes)


def fp8(rows: int, columns: int, block: tuple[int, int], scale_bytes: int) -> Size:
    """One byte per element and one scale per block."""
    scales = -(-rows // block[0]) * -(-columns // block[1])
    return Size(rows * columns, rows * columns + scales * scale_bytes)


def mxfp4(rows: int, columns: int) -> Size:
    """Half a byte per element and one byte per 32 of them."""
    return Size(rows * columns, rows * columns // 2 + rows * -(-columns // MXFP4_GROUP))
