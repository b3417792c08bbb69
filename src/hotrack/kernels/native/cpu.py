"""bf16 kernels for CPUs with AVX-512 BF16 (``cpu_bf16.c``) behind the operators of :class:`CpuOps`.

At decode sizes torch's own operators spend as much time between products as in them: here every product,
norm and attention call is one C function over one pool of threads that hands out small units of work, so that
a thread that loses its core for a moment does not hold up the others.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrack.kernels.base import AttentionPlan
from hotrack.kernels.cpu_ops.ops import CpuOps
from hotrack.kernels.native.compiler import NativeUnavailableError, NotThisMachineError, build_library
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.linear import GateUpKernel, LinearKernel
from hotrack.kernels.reference.norm import NormKernel

_NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"}
_BETTER = "amx_bf16"  # oneDNN drives these tile units; nothing here does
_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma")
_COLS = 32  # columns of a packed block
_SMALL = 64  # rows up to which a product is so short that giving up the interpreter lock costs more
_PLAIN, _ADD, _SILU_MUL, _FLOAT_OUT = range(4)


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_long),
        ("k", ctypes.c_long),
    )


class Library:
    """The functions of ``cpu_bf16.c``. ``long_*`` ones let other Python threads run meanwhile.

    Raises:
        NativeUnavailableError: this CPU or this machine's compiler cannot do it.
    """

    def __init__(self) -> None:
        flags = set(_cpu_flags())
        if missing := sorted(_NEEDED - flags):
            raise NotThisMachineError(f"this CPU lacks {', '.join(missing)}")
        if _BETTER in flags:
            raise NotThisMachineError("this CPU has AMX, which oneDNN uses better")
        path = str(build_library(Path(__file__).with_name("cpu_bf16.c"), _FLAGS))
        try:
            held, released = ctypes.PyDLL(path), ctypes.CDLL(path)
        except OSError as error:
            raise NativeUnavailableError(f"cannot load {path}: {error}") from error
        pointer, number = ctypes.c_void_p, ctypes.c_long
        linear = (pointer, ctypes.c_int, pointer, number, pointer, number, pointer, number)
        norm = (pointer, number, pointer, pointer, number, number, number, ctypes.c_float)
        rotate = (pointer, number, pointer, pointer, pointer, pointer, number, number, number, number)
        attend = (
            *(pointer, number, pointer, pointer, number, pointer, pointer, pointer),
            *(number,) * 6,
            ctypes.c_float,
        )
        for library in (held, released):
            for name, types in (
                ("linear", linear),
                ("rms_norm", norm),
                ("rotate_and_cache", rotate),
                ("paged_attention", attend),
                ("pack", (pointer, number, number, ctypes.c_int, pointer)),
                ("exp", (pointer, pointer, number)),
            ):
                function = _function(library, f"hotrack_{name}")
                function.argtypes, function.restype = types, None
        self.linear, self.long_linear = held.hotrack_linear, released.hotrack_linear
        self.rms_norm = held.hotrack_rms_norm
        self.rotate_and_cache = held.hotrack_rotate_and_cache
        self.paged_attention = held.hotrack_paged_attention
        self.long_paged_attention = released.hotrack_paged_attention
        self.pack = released.hotrack_pack
        self.exp = held.hotrack_exp
        self.set_threads = _function(held, "hotrack_set_threads")


def _function(library: ctypes.CDLL, name: str) -> Any:
    try:
        return getattr(library, name)
    except AttributeError as error:
        raise NativeUnavailableError(f"{library._name} has no function {name}") from error


@cache
def library() -> Library:
    """Built and loaded at the first call. Raises NativeUnavailableError."""
    return Library()


def _cpu_flags() -> list[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return line.split()[2:]
    except OSError:
        pass
    return []


class NativeLinear(LinearKernel):
    """A plain product until ``pack``; afterwards ``weight`` is not read."""

    halves = 1
    kind = _PLAIN

    def __init__(self, weight: Tensor, bias: Tensor | None, native: Library) -> None:
        super().__init__(weight, bias)
        self.packed: Tensor | None = None
        self.native = native
        self.columns, self.inner = weight.shape[0] // self.halves, weight.shape[1]

    def _run(self, x: Tensor, kind: int, residual: Tensor | None = None) -> Tensor:
        rows = len(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(rows, self.columns, dtype=torch.float32 if kind == _FLOAT_OUT else torch.bfloat16)
        run = self.native.linear if rows <= _SMALL else self.native.long_linear
        if residual is None:
            run(self.fixed, kind, x.data_ptr(), x.stride(0), None, 0, out.data_ptr(), rows)
        else:
            added, stride = residual.data_ptr(), residual.stride(0)
            run(self.fixed, kind, x.data_ptr(), x.stride(0), added, stride, out.data_ptr(), rows)
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) if self.packed is None else self._run(x, self.kind)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return super().add(x, residual) if self.packed is None else self._run(x, _ADD, residual)

    def to_float(self, x: Tensor) -> Tensor:
        return super().to_float(x) if self.packed is None else self._run(x, _FLOAT_OUT)

    def pack(self) -> None:
        if self.packed is not None:
            return
        blocks = -(-self.columns // _COLS)
        packed = torch.empty(blocks * self.halves * _COLS * self.inner, dtype=torch.bfloat16)
        source = self.weight.contiguous()
        self.native.pack(source.data_ptr(), self.columns, self.inner, self.halves, packed.data_ptr())
        bias = None if self.bias is None else self.bias.data_ptr()
        fixed = _Linear(packed.data_ptr(), bias, self.columns, self.inner)
        self._fixed, self.fixed = fixed, ctypes.addressof(fixed)
        self.packed = packed

    def unpack(self) -> None:
        self.packed = None

    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes

    def reads_weight(self) -> bool:
        return self.packed is None


class NativeGateUp(NativeLinear, GateUpKernel):
    """``silu(gate(x)) * up(x)`` in one pass over both halves of the weight."""

    halves = 2
    kind = _SILU_MUL


class NativeNorm(NormKernel):
    """RMSNorm of rows, or of every head in a row."""

    def __init__(self, weight: Tensor, eps: float, native: Library) -> None:
        super().__init__(weight, eps)
        self.native = native

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != x.shape[2]):
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        tokens, heads, size = (len(x), 1, x.shape[1]) if x.dim() == 2 else x.shape
        self.native.rms_norm(
            x.data_ptr(), x.stride(0), self.weight.data_ptr(), out.data_ptr(), tokens, heads, size, self.eps
        )
        return out


class NativePlan(AttentionPlan):
    """Which keys each token of the step sees, and where its own go.

    new_rows  int64 [T * 2H], rows of the cache: K of every head, then V
    row_seq   int32 [T], sequence of each token;  row_len  int32 [T], keys it sees
    """

    def __init__(self, batch: PagedBatch, heads: HeadShape) -> None:
        super().__init__(batch)
        H, d, size = heads.num_kv_heads, heads.head_dim, batch.block_size
        block, offset = batch.slot_mapping // size, batch.slot_mapping % size
        first = block * (batch.block_stride // d) + offset
        self.new_rows = (first[:, None] + torch.arange(2 * H) * size).flatten()
        self.tables = batch.block_tables.contiguous()
        query_lens = torch.tensor(batch.query_lens, dtype=torch.int32)
        seq_lens = torch.tensor(batch.seq_lens, dtype=torch.int32)
        sequences = torch.arange(len(seq_lens), dtype=torch.int32)
        if batch.num_decodes == len(batch.seq_lens):
            self.row_seq, self.row_len = sequences, seq_lens
        else:
            ends = query_lens.cumsum(0)
            self.row_seq = torch.repeat_interleave(sequences, query_lens)
            left = torch.repeat_interleave(ends, query_lens) - torch.arange(1, int(ends[-1]) + 1)
            self.row_len = (torch.repeat_interleave(seq_lens, query_lens) - left).to(torch.int32)


class NativeOps(CpuOps):
    """For bf16 models; ``num_threads`` work on every call."""

    def __init__(self, native: Library, num_threads: int) -> None:
        self.native = native
        native.set_threads(num_threads)

    def rms_norm(self, weight: Tensor, eps: float) -> NormKernel:
        if weight.dtype is not torch.bfloat16:
            return super().rms_norm(weight, eps)
        return NativeNorm(weight, eps, self.native)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        odd = weight.shape[1] % 2
        return super().linear(weight, bias) if odd else NativeLinear(weight, bias, self.native)

    def gate_up(self, weight: Tensor, bias: Tensor | None = None) -> LinearKernel:
        odd = weight.shape[1] % 2
        return super().gate_up(weight, bias) if odd else NativeGateUp(weight, bias, self.native)

    def plan_attention(self, batch: PagedBatch, heads: HeadShape, dtype: torch.dtype) -> AttentionPlan:
        d, size = heads.head_dim, batch.block_size
        fits = d % 64 == 0 and d <= 256 and size % 16 == 0 and batch.block_stride % d == 0
        fits = fits and batch.window is None and heads.v_dim == d
        return NativePlan(batch, heads) if fits else super().plan_attention(batch, heads, dtype)

    def rotate_and_cache(
        self, qkv: Tensor, heads: HeadShape, cos: Tensor, sin: Tensor, kv: LayerKV, plan: AttentionPlan
    ) -> None:
        H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
        if not isinstance(plan, NativePlan) or kv.rows is None or cos.shape[-1] != d:
            super().rotate_and_cache(qkv, heads, cos, sin, kv, plan)
            return
        self.native.rotate_and_cache(
            *(qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr()),
            *(plan.new_rows.data_ptr(), kv.rows.data_ptr(), len(qkv), H + K, K, d),
        )

    def paged_attention(self, q: Tensor, kv: LayerKV, plan: AttentionPlan, scale: float) -> Tensor:
        if not isinstance(plan, NativePlan):
            return super().paged_attention(q, kv, plan, scale)
        tokens, heads, d = q.shape
        kv_heads = kv.k.shape[1]
        out = torch.empty(q.shape, dtype=torch.bfloat16)
        run = self.native.paged_attention if tokens <= _SMALL else self.native.long_paged_attention
        run(
            *(q.data_ptr(), q.stride(0), kv.k.data_ptr(), plan.tables.data_ptr(), plan.tables.stride(0)),
            *(plan.row_seq.data_ptr(), plan.row_len.data_ptr(), out.data_ptr()),
            *(tokens, kv_heads, heads // kv_heads, d, plan.batch.block_size, plan.batch.block_stride, scale),
        )
        return out
