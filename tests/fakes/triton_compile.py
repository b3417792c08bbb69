"""Compiles Triton kernels for GPUs that are not there, with the arguments a launch would have passed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip


@dataclass
class Launch:
    """A kernel and what it was called with."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Compiled:
    """Of one program: ``shared`` bytes; ``ptx``."""

    name: str
    shared: int
    ptx: str
    cubin: bytes


class _Recorder:
    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: object) -> Any:
        return lambda *args, **options: self.launches.append(Launch(self.kernel, args, options))


@contextmanager
def recorded(*modules: Any) -> Iterator[list[Launch]]:
    """Launches of the modules' kernels, which do not run."""
    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in vars(module).items():
                if isinstance(value, triton.JITFunction):
                    patch.setattr(module, name, _Recorder(value, launches))
        yield launches


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """As the launcher would specialise it: 90 for a 9.0 device."""
    kernel, constants, signature, attrs = launch.kernel, {}, {}, {}
    values = dict(zip(kernel.arg_names, launch.args, strict=False))
    values |= {name: launch.options[name] for name in kernel.arg_names if name in launch.options}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or (
            value == 1 if type(value) is int and not param.do_not_specialize else False
        ):
            constants[(index,)], signature[param.name] = value, "constexpr"
        elif isinstance(value, Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attrs[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i64" if abs(value) >= 1 << 31 else "i32"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(index,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attrs)
    options = {name: value for name, value in launch.options.items() if name not in kernel.arg_names}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(kernel.__name__, built.metadata.shared, built.asm["ptx"], built.asm["cubin"])
