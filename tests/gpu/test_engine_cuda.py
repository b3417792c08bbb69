"""The engine on one GPU: operations against their reference, logits against transformers, tokens against the
CPU's, and the same tokens after sleeping."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.tiny_checkpoints import write_tiny
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.config.engine import EngineConfig
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine.in_process import InProcessBackend
from hotrack.engine.upload import Landed, make_uploader, to_host
from hotrack.hub.resolve import resolve
from hotrack.kernels.cuda_ops import attention, moe
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.ops import Ops, select_ops
from hotrack.kernels.paged import HeadShape, LayerKV, PagedBatch
from hotrack.kernels.reference import attention as plain_attention
from hotrack.kernels.reference import moe as plain_moe
from hotrack.kernels.reference import norm as plain_norm
from hotrack.kernels.reference import rope as plain_rope
from hotrack.kernels.reference.linear import silu_and_mul
from hotrack.kvcache.spec import Paged, group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.models import CausalLM, build_model
from tiny_moe_data import encode_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # "a prototype feature" of torch's, and transformers' own
]
BLOCK = 16
FAMILIES = ("llama", "qwen3", "qwen3_moe")
BF16 = torch.bfloat16


def gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def make_ops(kind: str) -> Ops:
    """'fused': what engines use; 'plain': torch's own kernels, their twins."""
    return CudaOps() if kind == "plain" else select_ops(gpu(), BF16)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(gpu(), dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference by the norm of what is expected; infinite for NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    assert expected.norm() > 0
    gap = ((found - expected).norm() / expected.norm()).item()
    return gap if gap == gap else float("inf")


# ---- operations


def a_step(
    heads: HeadShape, query_lens: list[int], seq_lens: list[int], dtype: torch.dtype
) -> tuple[LayerKV, PagedBatch]:
    """Layer 1 of 3 in a cache full of random numbers, and a step over sequences in scattered blocks."""
    spec = Paged(heads.num_kv_heads, heads.head_dim, heads.head_dim, dtype.itemsize)
    (group,) = group_layers([spec] * 3, BLOCK)
    num_blocks = 2 + sum(-(-n // BLOCK) for n in seq_lens)
    storage = random(num_blocks, group.row_bytes // dtype.itemsize, dtype=dtype).view(torch.uint8)
    kv = KVTensors([group], [storage], dtype)
    free = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist()
    tables, slots = torch.zeros(len(seq_lens), -(-max(seq_lens) // BLOCK), dtype=torch.int32), []
    for row, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(-(-total // BLOCK))]
        tables[row, : len(blocks)] = torch.tensor(blocks)
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(total - new, total)]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    decodes = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
    return kv.layers[1], PagedBatch(
        tables.to(gpu()), torch.tensor(slots, device=gpu()), query_lens, seq_lens, decodes, BLOCK,
        group.row_bytes // dtype.itemsize, starts.to(gpu()),
        torch.tensor(seq_lens, dtype=torch.int32, device=gpu()),
    )  # fmt: skip


STEPS = [
    ([1], [1]),
    ([1], [517]),
    ([33], [33]),
    ([7], [300]),
    ([300], [1000]),
    ([1] * 5, [5, 170, 16, 33, 700]),
    ([1, 1, 60, 3], [120, 3, 60, 300]),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("query_lens", "seq_lens"), STEPS)
@pytest.mark.parametrize("heads", [HeadShape(32, 4, 128), HeadShape(4, 2, 32), HeadShape(9, 3, 64)])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_paged_attention(
    kind: str, heads: HeadShape, query_lens: list[int], seq_lens: list[int], dtype: torch.dtype
) -> None:
    kv, batch = a_step(heads, query_lens, seq_lens, dtype)
    ops, tokens = make_ops(kind), sum(query_lens)
    plan = ops.plan_attention(batch, heads, dtype)
    prepared = isinstance(plan, attention.CudaAttentionPlan)
    assert prepared or (kind == "fused" and max(query_lens) == 1)
    new = random(tokens, 2 * heads.num_kv_heads * heads.head_dim, seed=2, dtype=dtype)
    ops.write_kv(new, kv, plan)
    k, v = kv.k.clone(), kv.v.clone()
    plain_attention.write_kv(new, kv, batch.slot_mapping)
    assert torch.equal(kv.k, k)
    assert torch.equal(kv.v, v)
    packed = random(tokens, heads.num_heads + 3, heads.head_dim, seed=3, dtype=dtype)
    q = packed[:, : heads.num_heads]  # rows apart, as they are between k and v
    scale = heads.head_dim**-0.5
    found = ops.paged_attention(q, kv, plan, scale)
    expected = plain_attention.paged_attention(q, kv, batch, scale)
    assert relative(found, expected) < (3e-5 if dtype == torch.float32 else 1e-2)


def test_paged_attention_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = HeadShape(8, 2, 64)
    kv, batch = a_step(heads, [1, 1, 1, 40], [50, 90, 20, 200], BF16)
    q = random(43, 8, 64, seed=5)
    whole = CudaOps().paged_attention(q, kv, CudaOps().plan_attention(batch, heads, BF16), 0.125)
    monkeypatch.setattr(attention, "GATHER_TOKENS", 64)
    parts = CudaOps().paged_attention(q, kv, CudaOps().plan_attention(batch, heads, BF16), 0.125)
    assert relative(parts, whole) < 1e-2


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (8, 2, 128, 64)])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_experts(kind: str, tokens: int, shape: tuple[int, int, int, int]) -> None:
    ops = make_ops(kind)
    experts, k, D, width = shape
    x = random(tokens, D)
    gate_up = random(experts, 2 * width, D, seed=1, scale=D**-0.5)
    down = random(experts, D, width, seed=2, scale=width**-0.5)
    assert moe.can_group(gate_up, down)
    ids, weights = ops.softmax_topk(random(tokens, experts, seed=3), k, True)
    expected = plain_moe.moe_experts(x, gate_up, down, ids, weights)
    found = ops.routed_experts(x, gate_up, down, ids, weights)
    assert relative(found, expected) < 1e-2
    assert torch.equal(found, ops.routed_experts(x, gate_up, down, ids, weights))


def test_experts_in_float32_take_the_loop() -> None:
    gate_up, down = (random(8, *s, dtype=torch.float32) for s in ((64, 32), (32, 32)))
    x, (ids, weights) = random(9, 32, dtype=torch.float32), CudaOps().softmax_topk(random(9, 8), 2, True)
    expected = plain_moe.moe_experts(x.cpu(), gate_up.cpu(), down.cpu(), ids.cpu(), weights.cpu())
    assert relative(CudaOps().routed_experts(x, gate_up, down, ids, weights), expected) < 1e-5


@pytest.mark.parametrize("tokens", [1, 77])
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_elementwise(kind: str, tokens: int) -> None:
    ops, x = make_ops(kind), random(tokens, 12, 128)
    weight = 1 + random(128, seed=1, scale=0.1)
    assert relative(ops.rms_norm(weight, 1e-6)(x[:, :5]), plain_norm.rms_norm(x[:, :5], weight, 1e-6)) < 1e-2
    frequency = 1e6 ** -(torch.arange(0, 128, 2, device=gpu()) / 128)
    cos, sin = ops.rope_tables(torch.arange(tokens, device=gpu()) * 91, frequency, 1.0, BF16)
    rotated = x.clone()
    ops.apply_rope(rotated[:, :7], cos, sin)
    assert relative(rotated[:, :7], plain_rope.apply_rope(x[:, :7], cos, sin)) < 1e-2
    assert torch.equal(rotated[:, 7:], x[:, 7:])
    rows, matrix, residual = random(tokens, 256), random(96, 256, seed=4), random(tokens, 96, seed=5)
    expected = residual.double() + rows.double() @ matrix.double().T
    assert relative(ops.linear(matrix).add(rows, residual), expected) < 1e-2
    bias = random(96, seed=6)
    assert relative(ops.linear(matrix, bias).add(rows, residual), expected + bias.double()) < 1e-2
    gated = ops.gate_up(matrix)(rows)
    assert relative(gated, silu_and_mul(rows.double() @ matrix.double().T)) < 1e-2


def test_upload_and_landing() -> None:
    uploader = make_uploader(gpu())
    for count in (1, 10, 5000, 3, 20000, 1):
        numbers = torch.arange(count, dtype=torch.int32).numpy()
        wide, table, empty = uploader.upload(
            [numbers.astype("int64") + 7, numbers.reshape(1, -1), numbers[:0].astype("int64")]
        )
        assert (wide.dtype, table.dtype) == (torch.int64, torch.int32)
        assert (table.shape, empty.shape) == ((1, count), (0,))
        back, landed = to_host(wide - 7), Landed(gpu())
        landed.wait()
        assert back.is_pinned()
        assert torch.equal(back, torch.arange(count))
        assert torch.equal(table.cpu()[0], torch.arange(count, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("heads", [HeadShape(32, 4, 128), HeadShape(9, 3, 64)])
def test_norm_rotate_and_cache(heads: HeadShape, normed: bool, dtype: torch.dtype) -> None:
    H, K, d = heads.num_heads, heads.num_kv_heads, heads.head_dim
    query_lens, seq_lens = [1, 1, 60], [120, 3, 61]
    tokens = sum(query_lens)
    qkv = random(tokens, (H + 2 * K) * d, seed=3, dtype=dtype)
    weights = [1 + random(d, seed=s, dtype=dtype, scale=0.2) for s in (4, 5)]
    norms = tuple(CudaOps().rms_norm(weight, 1e-6) for weight in weights) if normed else None
    frequency = 1e4 ** -(torch.arange(0, d, 2, device=gpu()) / d)
    cos, sin = CudaOps().rope_tables(torch.arange(tokens, device=gpu()) * 5, frequency, 1.0, dtype)
    found = []
    for kind in ("plain", "fused"):
        ops, mine = make_ops(kind), qkv.clone()
        kv, batch = a_step(heads, query_lens, seq_lens, dtype)
        ops.norm_rotate_and_cache(mine, heads, norms, cos, sin, kv, ops.plan_attention(batch, heads, dtype))
        found.append((mine[:, : H * d], kv.k.clone(), kv.v.clone()))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative(found[1][0], found[0][0]) < tolerance
    assert relative(found[1][1], found[0][1]) < tolerance
    assert torch.equal(found[1][2], found[0][2])


# ---- models


class Runner:
    """Steps of a model on the GPU over a cache of its own. Sequences are (blocks, computed tokens)."""

    def __init__(self, path: Path, dtype: torch.dtype, num_blocks: int = 128) -> None:
        with open_checkpoint(resolve(str(path))) as checkpoint:
            self.model: CausalLM = build_model(
                checkpoint.spec, dtype=dtype, device=gpu(), tp=TensorParallel(), allocate=self._allocate
            )
            load_weights(checkpoint, self.model.load_plan())
        groups = group_layers(self.model.cache_specs(), BLOCK)
        # NaN everywhere: a key that is read before it was written shows.
        storage = [
            torch.full((num_blocks, g.row_bytes // dtype.itemsize), float("nan"), dtype=dtype, device=gpu())
            for g in groups
        ]
        self.kv = KVTensors(groups, [s.view(torch.uint8) for s in storage], dtype)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3)) + 1
        self.free: list[int] = order.tolist()

    @staticmethod
    def _allocate(specs):
        return {s.name: torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=gpu()) for s in specs}

    def step(self, work: list[tuple[dict, Tensor]]) -> Tensor:
        """Logits of every token of the step, on the CPU. ``work``: (sequence, next ids), decodes first."""
        slots, positions, lens = [], [], []
        for seq, ids in work:
            end = seq["computed"] + len(ids)
            while len(seq["blocks"]) * BLOCK < end:
                seq["blocks"].append(self.free.pop())
            span = range(seq["computed"], end)
            positions += span
            slots += [seq["blocks"][p // BLOCK] * BLOCK + p % BLOCK for p in span]
            lens.append(len(ids))
            seq["computed"] = end
        width = max(len(seq["blocks"]) for seq, _ in work)
        tables = [seq["blocks"] + [0] * (width - len(seq["blocks"])) for seq, _ in work]
        starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
        computed = [seq["computed"] for seq, _ in work]

        def there(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=gpu())

        batch = ForwardBatch(
            input_ids=torch.cat([ids for _, ids in work]).to(gpu()),
            positions=there(positions),
            query_start=there(starts, torch.int32),
            seq_lens=there(computed, torch.int32),
            logits_rows=there(list(range(starts[-1]))),
            groups=tuple(GroupTables(there(tables, torch.int32), there(slots)) for _ in self.kv.groups),
            num_decodes=next((i for i, n in enumerate(lens) if n > 1), len(lens)),
            query_lens_list=lens,
            seq_lens_list=computed,
        )
        return self.model.compute_logits(self.model.forward(batch, self.kv)).cpu()


def fresh(blocks: list[int] | None = None, computed: int = 0) -> dict:
    return {"blocks": list(blocks or []), "computed": computed}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_tiny(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def reference_logits(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' on the CPU."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        return theirs.eval()(ids[None], use_cache=False).logits[0].float()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_logits_of_transformers(checkpoints: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    """Whole prompt, chunks, decodes beside another sequence's chunk, and a shared prefix."""
    ids = torch.randint(3, 512, (150,), generator=torch.Generator().manual_seed(2))
    expected = reference_logits(checkpoints[family], ids)
    assert expected.std() > 0.5
    noise = (reference_logits(checkpoints[family], ids, dtype) - expected).abs().mean(-1).max()
    runner = Runner(checkpoints[family], dtype)

    def check(found: Tensor, first: int) -> None:
        right = expected[first : first + len(found)]
        if dtype == torch.float32:
            assert (found - right).abs().max() < 2e-4
        else:
            assert (found - right).abs().mean(-1).max() < 2 * noise  # theirs, of the same rounding
            assert found.isfinite().all()

    whole = fresh()
    check(runner.step([(whole, ids)]), 0)
    a, b = fresh(), fresh()
    for first, last in ((0, 1), (1, 18), (18, 100)):
        check(runner.step([(a, ids[first:last])]), first)
    both = runner.step([(a, ids[100:101]), (b, ids[:70])])
    check(both[:1], 100)
    check(both[1:], 0)
    for position in (101, 102):
        both = runner.step([(a, ids[position : position + 1]), (b, ids[position - 31 : position - 30])])
        check(both[:1], position)
        check(both[1:], position - 31)
    shared = fresh(whole["blocks"][:4], 64)  # a prefix hit: four blocks of another sequence
    check(runner.step([(shared, ids[64:])]), 64)


def test_no_hidden_waits(checkpoints: dict[str, Path]) -> None:
    """A step only launches: nothing in it asks the device for a value."""
    runner = Runner(checkpoints["qwen3_moe"], BF16)
    seq, ids = fresh(), torch.arange(3, 60)
    runner.step([(seq, ids)])
    original = runner.model.forward

    def guarded(*args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.model.forward = guarded
    runner.step([(seq, torch.tensor([5])), (fresh(), ids)])


# ---- the engine

PROMPTS = [list(range(3, 40)), [7, 8, 9], [(i * i) % 400 + 3 for i in range(200)], list(range(3, 40))]


def generate(backend: InProcessBackend, prompts: list[list[int]], count: int, **options) -> list[list[int]]:
    options = {"temperature": 0.0, **options}
    requests = [
        EngineRequest(
            f"{id(prompts)}-{i}",
            pack_tokens(prompt),
            SamplingParams(max_tokens=count, ignore_eos=True, **options),
            count,
        )
        for i, prompt in enumerate(prompts)
    ]
    outputs = backend.run(requests, lambda _: False)
    for found in outputs.values():
        last: EngineOutput = found[-1]
        assert last.finish_reason is not FinishReason.ERROR, last.error
    return [[t for o in outputs[r.request_id] for t in unpack_tokens(o.tokens)] for r in requests]


def engine(path: Path, **options) -> InProcessBackend:
    defaults = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    return InProcessBackend(EngineConfig(model=str(path), **{**defaults, **options}))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_the_cpu(checkpoints: dict[str, Path], family: str) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        backend = engine(
            checkpoints[family], device=device, dtype="float32", max_num_batched_tokens=64, num_threads=4
        )
        found[device] = generate(backend, PROMPTS, 24)
        backend.close()
    assert found["cuda"] == found["cpu"]
    assert len({token for tokens in found["cpu"] for token in tokens}) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiny_moe(dtype: str) -> None:
    """The trained demo model on its own held-out questions."""
    checked = json.loads((resolve("tiny-moe").path / "eval.json").read_text())["examples"]
    prompts = [encode_prompt([("user", example["prompt"])]) for example in checked]
    found = {}
    for device in ("cpu", "cuda"):
        backend = InProcessBackend(
            EngineConfig(model="tiny-moe", device=device, dtype=dtype, max_model_len=256, num_threads=4,
                         max_num_seqs=4, kv_cache_memory_bytes=64 << 20)
        )  # fmt: skip
        found[device] = generate(backend, prompts, 32)
        backend.close()
    assert found["cuda"] == found["cpu"]
    texts = [bytes(token for token in tokens if token < 256).decode() for tokens in found["cuda"]]
    right = [t.startswith(example["answer"]) for t, example in zip(texts, checked, strict=True)]
    assert sum(right) >= len(right) - 1, texts


def test_sampling_is_reproducible_and_pipelined(checkpoints: dict[str, Path]) -> None:
    found = []
    for depth in (0, 1):
        backend = engine(checkpoints["qwen3_moe"], device="cuda", pipeline_depth=depth)
        options = {"temperature": 0.9, "top_p": 0.8, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2}
        found.append(generate(backend, PROMPTS[:1], 30, **options))
        assert generate(backend, PROMPTS[:1], 30, **options) == found[-1]
        backend.close()
    assert len(set(found[0][0])) > 5
    assert found[0] == found[1]


def test_no_hidden_waits_in_the_engine(checkpoints: dict[str, Path]) -> None:
    """Between submitting a step and reading its tokens nothing asks the device for a value."""
    backend = engine(checkpoints["qwen3_moe"], device="cuda", max_num_batched_tokens=64)
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3}
    expected = generate(backend, PROMPTS, 8), generate(backend, PROMPTS[1:], 8, **sampled)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = generate(backend, PROMPTS, 8), generate(backend, PROMPTS[1:], 8, **sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(tokens) for tokens in found[0]] == [len(tokens) for tokens in expected[0]]
    backend.close()


def test_engines_give_the_gpu_back(checkpoints: dict[str, Path]) -> None:
    engine(checkpoints["llama"], device="cuda").close()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        backend = engine(checkpoints["llama"], device="cuda")
        generate(backend, PROMPTS[:1], 3)
        backend.close()
    assert free - torch.cuda.mem_get_info()[0] < 64 << 20


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sleep_and_wake(checkpoints: dict[str, Path], family: str, streamed: bool) -> None:
    backend = engine(
        checkpoints[family], device="cuda", enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30
    )
    expected = generate(backend, PROMPTS, 20)
    for level in (1, 1, 2, 1):
        before = torch.cuda.mem_get_info()[0]
        report = backend.control("sleep", level=level)
        assert report["is_sleeping"]
        assert torch.cuda.mem_get_info()[0] - before >= report["freed_bytes"] > 0
        assert not backend.control("wake", streamed=streamed)["is_sleeping"]
        assert generate(backend, PROMPTS, 20) == expected
    backend.close()


def test_auto_is_the_gpu_and_sizes_the_cache(checkpoints: dict[str, Path]) -> None:
    free = torch.cuda.mem_get_info()[0]
    backend = engine(checkpoints["qwen3"], kv_cache_memory_bytes=None, gpu_memory_utilization=0.3)
    info = backend.info
    assert info["device"].startswith("cuda")
    assert info["dtype"] == "bfloat16"
    assert info["workspace_bytes"] > 0
    assert info["kv_cache_bytes"] + info["weight_bytes"] + info["workspace_bytes"] <= 0.3 * free
    assert len(generate(backend, PROMPTS, 4)[0]) == 4
    backend.close()


def test_random_weights(tmp_path: Path) -> None:
    import json

    from fakes.tiny_checkpoints import tiny_config

    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3_moe")))
    found = []
    for _ in range(2):
        backend = engine(tmp_path, device="cuda", load_format="dummy")
        found.append(generate(backend, PROMPTS, 10))
        backend.control("sleep", level=2)
        backend.control("wake")
        assert generate(backend, PROMPTS, 10) == found[-1]
        backend.close()
    assert found[0] == found[1]
    assert len({token for tokens in found[0] for token in tokens}) > 3
