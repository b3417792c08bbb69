"""The compiled CPU kernels against their torch twins in float32."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotrack.kernels.native import compiler, cpu
from hotrack.kernels.native.compiler import NativeUnavailableError, build_library
from hotrack.kernels.native.cpu import NativeOps, NativePlan, library
from hotrack.kernels.ops import Ops, select_ops
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference.rope import rope_tables

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    try:
        return NativeOps(library(), 2)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(BF16)


def close(found: Tensor, wanted: Tensor, tolerance: float = 8e-3) -> None:
    """Relative error of the whole result; NaN fails."""
    error = (found.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < tolerance, f"{error=}"


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 11, 12, 13, 25, 70])
@pytest.mark.parametrize(("columns", "inner"), [(576, 576), (33, 64), (5, 10), (100, 62), (9000, 16)])
def test_linear_kinds(ops: NativeOps, rows: int, columns: int, inner: int) -> None:
    weight, bias = rand(columns, inner, scale=inner**-0.5), rand(columns)
    x, residual = rand(rows, inner + 6)[:, 2 : inner + 2], rand(rows, columns)
    kernel = ops.linear(weight, bias)
    kernel.pack()
    assert not kernel.reads_weight()
    wanted = x.float() @ weight.float().T + bias.float()
    close(kernel(x), wanted)
    close(kernel.add(x, residual), wanted + residual.float())
    close(kernel.to_float(x), wanted, 1e-6)
    assert kernel.to_float(x).dtype is torch.float32
    kernel.unpack()
    assert kernel.packed_bytes() == 0
    close(kernel(x), wanted)


@pytest.mark.parametrize(("rows", "size"), [(1, 1536), (5, 40), (31, 32), (40, 33)])
def test_gate_up(ops: NativeOps, rows: int, size: int) -> None:
    weight, bias, x = rand(2 * size, 64, scale=0.3), rand(2 * size), rand(rows, 64)
    kernel = ops.gate_up(weight, bias)
    kernel.pack()
    gate, up = (x.float() @ weight.float().T + bias.float()).chunk(2, -1)
    close(kernel(x), torch.nn.functional.silu(gate) * up)


def test_extreme_gates_stay_finite(ops: NativeOps) -> None:
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(BF16)
    kernel = ops.gate_up(weight)
    kernel.pack()
    gates = torch.tensor([-3e4, -200.0, -90.0, 0.0, 90.0, 3e4])
    out = kernel(torch.stack((gates, torch.ones(6)), -1).to(BF16)).float().flatten()
    assert torch.equal(out[:3], torch.tensor([-0.0, -0.0, -0.0])) or out[:3].abs().max() < 1e-30
    assert torch.equal(out[3:], gates[3:].to(BF16).float())


def test_a_weight_with_odd_columns_keeps_the_twin(ops: NativeOps) -> None:
    weight, x = rand(8, 7), rand(2, 7)
    kernel = ops.linear(weight)
    kernel.pack()
    close(kernel(x), x.float() @ weight.float().T)


def test_no_rows(ops: NativeOps) -> None:
    kernel = ops.linear(rand(8, 8))
    kernel.pack()
    assert kernel(rand(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("shape", [(1, 576), (70, 576), (3, 20), (4, 9, 64), (2, 3, 100)])
def test_rms_norm(ops: NativeOps, shape: tuple[int, ...]) -> None:
    weight, x = rand(shape[-1]), rand(*shape[:-1], shape[-1])
    wide = (
        rand(shape[0], *(s * 2 for s in shape[1:-1]), shape[-1])
        if len(shape) == 3
        else rand(shape[0], 2 * shape[-1])
    )
    wide[tuple(slice(0, s) for s in shape)] = x
    strided = wide[tuple(slice(0, s) for s in shape)]
    wanted = torch.nn.functional.rms_norm(x.float(), (shape[-1],), weight.float(), 1e-5)
    close(ops.rms_norm(weight, 1e-5)(strided), wanted)


def make_cache(blocks: int, heads: int, d: int, size: int, layers: int = 2) -> tuple[LayerKV, int]:
    """The second of ``layers`` layers in packed rows of random, partly NaN, content."""
    row = layers * 2 * heads * size * d
    flat = rand(blocks, row)
    flat[0] = float("nan")  # nobody's block
    base, stride = 2 * heads * size * d, (row, size * d, d, 1)
    k = flat.as_strided((blocks, heads, size, d), stride, base)
    v = flat.as_strided((blocks, heads, size, d), stride, base + heads * size * d)
    tail = flat.flatten()[base:]
    return LayerKV(k, v, tail[: tail.numel() // d * d].view(-1, d), None), row


@pytest.mark.parametrize(
    ("heads", "d", "size"),
    [
        (HeadShape(9, 3, 64), 64, 16),
        (HeadShape(8, 1, 128), 128, 32),
        (HeadShape(5, 5, 64), 64, 16),
        (HeadShape(7, 1, 256), 256, 16),
    ],
)
def test_attention_over_scattered_blocks(ops: NativeOps, heads: HeadShape, d: int, size: int) -> None:
    """Decodes and chunks together; contexts around every boundary the kernel has."""
    query_lens = [1, 1, 1, 1, 1, 3, 40]
    seq_lens = [1, 16, 17, 513, 1100, 530, 45]
    longest = -(-max(seq_lens) // size)
    needed = [-(-n // size) for n in seq_lens]
    ids = (torch.randperm(sum(needed)) + 1).tolist()
    tables = torch.zeros(len(seq_lens), longest, dtype=torch.int32)
    for i, count in enumerate(needed):
        tables[i, :count] = torch.tensor([ids.pop() for _ in range(count)])
    kv, stride = make_cache(sum(needed) + 1, heads.num_kv_heads, d, size)
    slots = [
        int(tables[i, p // size]) * size + p % size
        for i, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
        for p in range(s - q, s)
    ]
    batch = PagedBatch(tables, torch.tensor(slots), query_lens, seq_lens, 5, size, stride)
    plan = ops.plan_attention(batch, heads, BF16)
    assert isinstance(plan, NativePlan)
    H, K, tokens = heads.num_heads, heads.num_kv_heads, sum(query_lens)
    qkv = rand(tokens, (H + 2 * K) * d)
    positions = torch.tensor([p for q, s in zip(query_lens, seq_lens, strict=True) for p in range(s - q, s)])
    cos, sin = rope_tables(positions, 1.0 / 10000 ** (torch.arange(d // 2) / (d // 2)), 1.0, BF16)

    twin = Ops()
    wanted_qkv, twin_kv = qkv.clone(), LayerKV(kv.k.clone(), kv.v.clone(), None, None)
    twin.rotate_and_cache(wanted_qkv, heads, cos, sin, twin_kv, twin.plan_attention(batch, heads, BF16))
    ops.rotate_and_cache(qkv, heads, cos, sin, kv, plan)
    close(qkv, wanted_qkv, 4e-3)
    close(kv.k[1:], twin_kv.k[1:], 4e-3)
    assert torch.equal(kv.v[1:], twin_kv.v[1:])

    q = qkv.view(tokens, -1, d)[:, :H]
    found = ops.paged_attention(q, kv, plan, d**-0.5)
    row = 0
    for i, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        table = tables[i, : needed[i]].long()
        k = kv.k[table].transpose(1, 2).reshape(-1, K, d)[:total].float().repeat_interleave(H // K, 1)
        v = kv.v[table].transpose(1, 2).reshape(-1, K, d)[:total].float().repeat_interleave(H // K, 1)
        scores = torch.einsum("qhd,khd->hqk", q[row : row + new].float(), k) * d**-0.5
        later = torch.arange(total)[None] > torch.arange(total - new, total)[:, None]
        p = scores.masked_fill(later, float("-inf")).softmax(-1)
        close(found[row : row + new], torch.einsum("hqk,khd->qhd", p, v))
        row += new


def test_two_threads_at_once_and_after_a_fork(ops: NativeOps) -> None:
    weight, x = rand(2048, 256), rand(4, 256)
    kernel = ops.linear(weight)
    kernel.pack()
    wanted, wrong = kernel(x), []

    def use() -> None:
        for _ in range(200):
            if not torch.equal(kernel(x), wanted):
                wrong.append(1)

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    code = (
        "import os,sys,torch\n"
        "from hotrack.kernels.native.cpu import NativeOps, library\n"
        "ops=NativeOps(library(),3); k=ops.linear(torch.randn(512,64).bfloat16()); k.pack()\n"
        "x=torch.randn(2,64).bfloat16(); y=k(x)\n"
        "pid=os.fork()\n"
        "ok=torch.equal(k(x),y)\n"
        "if pid==0: os._exit(0 if ok else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]) or not ok)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_selected_for_bf16_only(ops: NativeOps, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert isinstance(select_ops(cpu, BF16), NativeOps)
    assert not isinstance(select_ops(cpu, torch.float32), NativeOps)
    monkeypatch.setenv("HOTRACK_NATIVE", "0")
    assert not isinstance(select_ops(cpu, BF16), NativeOps)


def test_exp_at_its_limits(ops: NativeOps) -> None:
    inf = torch.inf
    some = [-inf, -1e30, -200.0, -104.0, -87.5, -20.0, -0.0, 1e-9, 1.0, 20.0, 88.5, 89.0, 200.0, 1e30, inf]
    x = torch.tensor([*some, torch.nan, *torch.linspace(-87, 88, 240).tolist()])
    out = torch.empty_like(x)
    ops.native.exp(x.data_ptr(), out.data_ptr(), len(x))
    wanted = x.exp()
    assert torch.equal(out.isnan(), wanted.isnan())
    assert torch.equal(out.isinf(), wanted.isinf())
    torch.testing.assert_close(out, wanted, rtol=3e-7, atol=2e-38, equal_nan=True)


def test_a_library_without_a_function_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not any(map(compiler.shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no compiler")
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path))
    (tmp_path / "other.c").write_text("int answer(void) { return 42; }\n")
    monkeypatch.setattr(cpu, "_cpu_flags", lambda: sorted(cpu._NEEDED))
    other = build_library(tmp_path / "other.c")
    monkeypatch.setattr(cpu, "build_library", lambda *_: other)
    with pytest.raises(NativeUnavailableError, match="has no function hotrack_linear"):
        cpu.Library()


def test_a_cache_that_fails_is_told_and_the_twin_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise NativeUnavailableError("no room")

    monkeypatch.setattr("hotrack.kernels.ops.library", refuse)
    assert not isinstance(select_ops(torch.device("cpu"), BF16), NativeOps)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "torch's own CPU kernels are used: no room")
    ]
