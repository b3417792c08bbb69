"""From an EngineConfig to a running EngineCore: weights loaded, KV cache sized, everything in planned
memory.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ConfigError, InsufficientMemoryError
from hotrack.core.progress import Progress
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine.core import EngineCore
from hotrack.engine.runner import ModelRunner, device_worker
from hotrack.engine.scheduler import Scheduler, SchedulerLimits
from hotrack.engine.transitions import Transitions
from hotrack.hub.model import ResolvedModel
from hotrack.hub.resolve import resolve
from hotrack.kvcache.manager import KVCacheManager, check_supported
from hotrack.kvcache.spec import CacheGroup, group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.memory.manager import MemoryManager
from hotrack.models.causal_lm import CausalLM
from hotrack.models.registry import build_model
from hotrack.modelspec.spec import ModelSpec

CPU_KV_BYTES_LIMIT = 1 << 30
HASH_EVERY = 64

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """``info``: what was decided at start, as plain data."""

    core: EngineCore
    spec: ModelSpec
    resolved: ResolvedModel
    info: dict[str, Any]


class _PackedWeights:
    """Lets the memory manager drop and remake the copies of weights that the model keeps for itself."""

    def __init__(self, model: CausalLM, memory: MemoryManager) -> None:
        self._model = model
        self._memory = memory

    def drop(self) -> None:
        self._model.before_sleep()

    def pack(self, names: Sequence[str]) -> None:
        """Packs what has landed, one weight at a time, so that never two copies of the whole model exist."""
        for name in names:
            self._memory.drop_pages(self._model.pack(name))


def build_engine(
    config: EngineConfig,
    *,
    tp: TensorParallel | None = None,
    salt: bytes = b"",
    progress: StageProgress | None = None,
    hash_every: int = 0,
) -> BuiltEngine:
    """Load ``config.model`` on this rank. ``hash_every``: see EngineCore.

    Raises:
        CheckpointError: the model is missing, damaged or of an unsupported kind.
        ConfigError: options contradict each other, the model or the device.
        InsufficientMemoryError: one full context does not fit in the KV cache.
    """
    tp = tp or TensorParallel()
    num_threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // tp.size)
    worker = device_worker(num_threads)
    try:
        return worker.submit(_build, config, tp, num_threads, worker, salt, progress, hash_every).result()
    except BaseException:
        worker.shutdown()
        raise


def _build(
    config: EngineConfig,
    tp: TensorParallel,
    num_threads: int,
    worker: ThreadPoolExecutor,
    salt: bytes,
    progress: StageProgress | None,
    hash_every: int,
) -> BuiltEngine:
    start = monotonic()
    device = torch.device(config.torch_device)
    resolved = resolve(config.model, progress=_stage(progress, "download"))
    checkpoint = open_checkpoint(resolved)
    spec = checkpoint.spec
    dtype = _dtype(config.dtype, spec)
    memory = MemoryManager(device, enable_sleep_mode=config.enable_sleep_mode, num_threads=num_threads)
    model = build_model(spec, dtype=dtype, device=device, tp=tp, allocate=memory.allocate_weights)

    def load() -> None:
        load_weights(checkpoint, model.load_plan(), progress=_stage(progress, "weights"))

    load()
    memory.seal()
    memory.packed = _PackedWeights(model, memory)
    memory.packed.pack([spec.name for spec in model.tensor_specs()])
    memory.reload = load
    loaded = monotonic()

    groups = group_layers(model.cache_specs(), config.block_size)
    num_blocks, max_model_len = _size_kv_cache(config, spec, groups, memory.weight_bytes, tp)
    storage = [
        memory.allocate_bytes("kv_cache", num_blocks * group.row_bytes).view(num_blocks, group.row_bytes)
        for group in groups
    ]
    num_slots = config.max_num_seqs * (1 + config.pipeline_depth)
    manager = KVCacheManager(
        groups,
        num_blocks,
        num_slots=num_slots,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        salt=salt,
    )
    runner = ModelRunner(
        model,
        KVTensors(groups, storage, dtype),
        manager,
        vocab_size=spec.vocab_size,
        num_slots=num_slots,
        max_model_len=max_model_len,
        device=device,
        tp=tp,
        worker=worker,
    )
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, max_model_len, num_slots)
    core = EngineCore(
        Scheduler(manager, limits),
        runner,
        Transitions(memory, lambda value: min_over_ranks(tp, value)),
        vocab_size=spec.vocab_size,
        pipeline_depth=config.pipeline_depth,
        hash_every=hash_every,
    )
    info = {
        "num_blocks": num_blocks,
        "block_size": config.block_size,
        "max_model_len": max_model_len,
        "vocab_size": spec.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "num_threads": num_threads,
        "weight_bytes": memory.weight_bytes,
        "prepacked_bytes": model.prepacked_bytes(),
        "kv_cache_bytes": num_blocks * _row_bytes(groups),
        "load_s": loaded - start,
    }
    return BuiltEngine(core, spec, resolved, info)


def min_over_ranks(tp: TensorParallel, value: int) -> int:
    """The smallest ``value`` of all ranks; every rank must call."""
    if tp.size == 1:
        return value
    smallest = torch.tensor([value], dtype=torch.int64)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group=tp.group)
    return int(smallest.item())


def _size_kv_cache(
    config: EngineConfig, spec: ModelSpec, groups: Sequence[CacheGroup], weight_bytes: int, tp: TensorParallel
) -> tuple[int, int]:
    """(blocks, max_model_len), equal on all ranks. Without --max-model-len the context shrinks to what
    fits.
    """
    for group in groups:
        check_supported(group)
    wanted = config.max_model_len or spec.max_position_embeddings
    if wanted > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {spec.max_position_embeddings} tokens this model was "
            f"trained for; use at most {spec.max_position_embeddings}"
        )
    row_bytes, tokens_per_block = _row_bytes(groups), groups[0].tokens_per_block
    blocks_per_context = -(-wanted // tokens_per_block)
    most = config.max_num_seqs * blocks_per_context + 1  # more could never be used at once
    budget = _kv_budget(config, weight_bytes)
    num_blocks = min_over_ranks(tp, min(budget // row_bytes, most) if budget is not None else most)
    capacity = (num_blocks - 1) * tokens_per_block
    if capacity < (wanted if config.max_model_len else 2 * tokens_per_block):
        raise InsufficientMemoryError(
            f"a context of {wanted} tokens needs {(blocks_per_context + 1) * row_bytes} bytes of KV cache; "
            f"{budget} bytes are available. Lower --max-model-len, or raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization."
        )
    return num_blocks, min(wanted, capacity)


def _kv_budget(config: EngineConfig, weight_bytes: int) -> int | None:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.gpu_memory_utilization is not None:
        total = psutil.virtual_memory().total
        return max(0, int(total * config.gpu_memory_utilization) - weight_bytes)
    return CPU_KV_BYTES_LIMIT


def _row_bytes(groups: Sequence[CacheGroup]) -> int:
    return sum(group.row_bytes for group in groups)


def _dtype(name: str, spec: ModelSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype if name == "auto" else name)
    return dtype


def _stage(progress: StageProgress | None, stage: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)
