"""From an EngineConfig to a running EngineCore: weights loaded, KV cache sized, everything in planned
memory.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch

from hotrack.checkpoint.dummy import fill_dummy
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.targets import LoadTarget
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ConfigError
from hotrack.core.host_copies import copy_path
from hotrack.core.progress import Progress
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine.agree import min_over_ranks
from hotrack.engine.core import EngineCore
from hotrack.engine.device import device_worker, resolve_device, resolve_dtype
from hotrack.engine.graphs import Capture, CudaCapture, graph_bytes
from hotrack.engine.host_copy import fill, shared_copy
from hotrack.engine.runner import ModelRunner
from hotrack.engine.scheduler import Scheduler, SchedulerLimits
from hotrack.engine.sizing import (
    cpu_kv_budget,
    cuda_kv_budget,
    kv_cache_bytes,
    measure_workspace,
    size_kv_cache,
)
from hotrack.engine.transitions import Transitions
from hotrack.hub.model import ResolvedModel
from hotrack.hub.resolve import resolve
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.spec import CacheGroup, State, group_layers
from hotrack.kvcache.tensors import KVTensors
from hotrack.memory.manager import MemoryManager
from hotrack.models.causal_lm import CausalLM
from hotrack.models.registry import build_model
from hotrack.modelspec.load import load_spec
from hotrack.modelspec.spec import ModelSpec
from hotrack.obs.log import get_logger

HASH_EVERY = 64

log = get_logger("hotrack.engine")

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """``info``: what was decided at start, as plain data."""

    core: EngineCore
    spec: ModelSpec
    resolved: ResolvedModel
    info: dict[str, Any]
    memory: MemoryManager

    def close(self) -> None:
        """End the engine and free the device; for a process that goes on. Nothing works afterwards."""
        if self.memory.device.type == "cuda":
            self.core.runner.call(self.core.runner.forget_graphs)  # or they would hold on to their memory
            self.core.runner.call(self.memory.close)
            self.core.runner.call(torch.cuda.empty_cache)
        self.core.close()


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
    device = resolve_device(config.device)
    if device.type == "cuda" and tp.size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {tp.size}: this version runs a model on one GPU; "
            "use --tensor-parallel-size 1, or --device cpu"
        )
    num_threads = config.num_threads or max(1, len(os.sched_getaffinity(0)) // tp.size)
    worker = device_worker(num_threads, device)
    try:
        return worker.submit(
            _build, config, device, tp, num_threads, worker, salt, progress, hash_every
        ).result()
    except BaseException:
        worker.shutdown()
        raise


def _build(
    config: EngineConfig,
    device: torch.device,
    tp: TensorParallel,
    num_threads: int,
    worker: ThreadPoolExecutor,
    salt: bytes,
    progress: StageProgress | None,
    hash_every: int,
) -> BuiltEngine:
    start = monotonic()
    free_at_start = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    resolved = resolve(config.model, progress=_stage(progress, "download"))
    weights = _dummy(config, resolved, device) if config.load_format == "dummy" else _checkpoint(resolved)
    spec = weights.spec
    dtype = resolve_dtype(config.dtype, spec, device)
    shared = shared_copy(config, resolved, dtype, device, tp)
    memory = MemoryManager(
        device,
        enable_sleep_mode=config.enable_sleep_mode,
        num_threads=num_threads,
        shared=shared,
    )
    model = build_model(spec, dtype=dtype, device=device, tp=tp, allocate=memory.allocate_weights)

    def load() -> None:
        weights.fill(model, memory, _stage(progress, "weights"))

    if not fill(memory, load):
        log.info("%s: weights taken from the host copy that an earlier process left", resolved.name)
    elif shared is not None:
        log.info("%s: the host copy stays in %s for the next start", resolved.name, copy_path(shared.name))
    if device.type == "cpu":
        memory.packed = _PackedWeights(model, memory)
        memory.packed.pack([spec.name for spec in model.tensor_specs()])
    memory.reload = load
    loaded = monotonic()

    groups = group_layers(model.cache_specs(), config.block_size)
    budget, workspace_bytes = _kv_budget(config, model, groups, device, memory.weight_bytes, free_at_start)
    num_blocks, max_model_len = size_kv_cache(config, spec, groups, budget, tp)
    storage = [
        memory.allocate_bytes("kv_cache", count * group.row_bytes).view(count, group.row_bytes)
        for count, group in zip(num_blocks, groups, strict=True)
    ]
    num_slots = config.max_num_seqs * (1 + config.pipeline_depth)
    manager = KVCacheManager(
        groups,
        num_blocks,
        num_slots=num_slots,
        max_model_len=max_model_len,
        max_step_tokens=config.max_num_batched_tokens,
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
        capture=_capture(config, groups, device, memory),
    )
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, max_model_len, num_slots)
    core = EngineCore(
        Scheduler(manager, limits),
        runner,
        Transitions(
            memory,
            lambda value: min_over_ranks(tp, value),
            # What torch's allocator keeps for the next step.
            torch.cuda.empty_cache if device.type == "cuda" else lambda: None,
        ),
        vocab_size=spec.vocab_size,
        pipeline_depth=config.pipeline_depth,
        hash_every=hash_every,
        device_streams=device.type == "cuda",
    )
    info = {
        "num_blocks": max(num_blocks),
        "block_size": config.block_size,
        "max_model_len": max_model_len,
        "vocab_size": spec.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "num_threads": num_threads,
        "weight_bytes": memory.weight_bytes,
        "prepacked_bytes": model.prepacked_bytes(),
        "kv_cache_bytes": kv_cache_bytes(groups, num_blocks),
        "workspace_bytes": workspace_bytes,
        "device": str(device),
        "load_s": loaded - start,
    }
    return BuiltEngine(core, spec, resolved, info, memory)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Where they come from: ``fill`` writes every parameter, or the host copy that ``seal`` fills it from."""

    spec: ModelSpec
    fill: Callable[[CausalLM, MemoryManager, Progress | None], object]


def _checkpoint(resolved: ResolvedModel) -> _Weights:
    checkpoint = open_checkpoint(resolved)

    def fill(model: CausalLM, memory: MemoryManager, progress: Progress | None) -> None:
        targets = {
            name: LoadTarget(memory.loading(name), target.sources)
            for name, target in model.load_plan().items()
        }
        load_weights(checkpoint, targets, progress=progress, filled=memory.loaded)

    return _Weights(checkpoint.spec, fill)


def _dummy(config: EngineConfig, resolved: ResolvedModel, device: torch.device) -> _Weights:
    spec = load_spec(resolved.path)

    def fill(model: CausalLM, _: MemoryManager, progress: Progress | None) -> None:
        fill_dummy(model.load_plan(), spec, seed=config.seed, device=device, progress=progress)

    log.warning(
        "%s: the weights are random numbers made from seed %d (--load-format dummy)",
        resolved.name,
        config.seed,
    )
    return _Weights(spec, fill)


def _kv_budget(
    config: EngineConfig,
    model: CausalLM,
    groups: Sequence[CacheGroup],
    device: torch.device,
    weight_bytes: int,
    free_at_start: int,
) -> tuple[int, int]:
    """Bytes for KV, and what a step needs beside weights and KV (0 on a CPU: not measured)."""
    if device.type == "cpu":
        return cpu_kv_budget(config, weight_bytes), 0
    workspace_bytes = measure_workspace(model, groups, config, device)
    if _has_graphs(config, groups):
        workspace_bytes += graph_bytes(config.max_num_seqs, model.spec.vocab_size)
    return cuda_kv_budget(config, free_at_start, weight_bytes, workspace_bytes), workspace_bytes


def _has_graphs(config: EngineConfig, groups: Sequence[CacheGroup]) -> bool:
    """Padding rows write to the null block, and a row of states has no place for what nobody reads."""
    return not config.enforce_eager and not any(isinstance(group.spec, State) for group in groups)


def _capture(
    config: EngineConfig, groups: Sequence[CacheGroup], device: torch.device, memory: MemoryManager
) -> Capture | None:
    if device.type != "cuda" or not _has_graphs(config, groups):
        return None
    return CudaCapture(device, memory.graph_pool if config.enable_sleep_mode else None)


def _stage(progress: StageProgress | None, stage: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(stage, done, total)
