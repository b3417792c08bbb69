"""Triton's interpreter with NumPy from 2.4 on, which no longer makes an int of an array of one element."""

from typing import Any

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patched(tensor: Any, scope: Any) -> None:
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def repair() -> None:
    """Once per process."""
    interpreter._patch_lang_tensor = _patched
