"""The C heap of this process."""

import ctypes

_libc = ctypes.CDLL(None, use_errno=True)


def trim_heap() -> None:
    """Return free pages of the C heap to the system; ``free`` alone keeps them.

    glibc only; other C libraries have no such call and nothing happens.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
