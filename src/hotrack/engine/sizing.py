"""How much of the device the KV cache gets."""

from collections.abc import Sequence

import psutil
import torch

from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ConfigError, InsufficientMemoryError
from hotrack.core.sampling import SamplingParams
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine.agree import min_over_ranks
from hotrack.engine.sampler import Sampler
from hotrack.engine.sampling_batch import SamplingState
from hotrack.kernels.cuda_ops.attention import GATHER_TOKENS
from hotrack.kvcache.spec import CacheGroup, Paged, State
from hotrack.kvcache.split import split_blocks
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.models.causal_lm import CausalLM
from hotrack.modelspec.spec import ModelSpec

CPU_KV_BYTES_LIMIT = 1 << 30
GPU_SHARE = 0.9


def size_kv_cache(
    config: EngineConfig,
    spec: ModelSpec,
    groups: Sequence[CacheGroup],
    budget: int,
    tp: TensorParallel,
) -> tuple[list[int], int]:
    """(blocks of each group, max_model_len), equal on all ranks. ``budget``: bytes for KV. Without
    --max-model-len the context shrinks to what fits.

    Raises:
        ConfigError: the model was not trained for such a context.
        InsufficientMemoryError: one full context does not fit.
    """
    wanted = wanted_model_len(config, spec)
    tokens_per_block = groups[0].tokens_per_block
    counts = split_blocks(
        groups,
        budget,
        max_num_seqs=config.max_num_seqs,
        max_model_len=wanted,
        max_step_tokens=config.max_num_batched_tokens,
    )
    num_blocks = [min_over_ranks(tp, count) for count in counts]
    paged = [n for n, group in zip(num_blocks, groups, strict=True) if isinstance(group.spec, Paged)]
    capacity = (min(paged) - 1) * tokens_per_block if paged else wanted
    enough = kv_cache_bytes(groups, num_blocks) <= budget
    if not enough or capacity < (wanted if config.max_model_len else 2 * tokens_per_block):
        rows = -(-wanted // tokens_per_block) + 1
        needed = [rows if isinstance(g.spec, Paged) else n for n, g in zip(num_blocks, groups, strict=True)]
        raise InsufficientMemoryError(
            f"a context of {wanted} tokens needs {kv_cache_bytes(groups, needed)} bytes of KV cache; "
            f"{budget} bytes are available. Lower --max-model-len, or raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization."
        )
    return num_blocks, min(wanted, capacity)


def wanted_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Raises ConfigError for more than the model was trained for."""
    wanted = config.max_model_len or spec.max_position_embeddings
    if wanted > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {spec.max_position_embeddings} tokens this model was "
            f"trained for; use at most {spec.max_position_embeddings}"
        )
    return wanted


def cpu_kv_budget(config: EngineConfig, weight_bytes: int) -> int:
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.gpu_memory_utilization is not None:
        total = psutil.virtual_memory().total
        return max(0, int(total * config.gpu_memory_utilization) - weight_bytes)
    return CPU_KV_BYTES_LIMIT


def cuda_kv_budget(config: EngineConfig, free_at_start: int, weight_bytes: int, workspace_bytes: int) -> int:
    """What is left of a GPU's free bytes for KV. ``workspace_bytes``: of the largest step and of graphs."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    share = GPU_SHARE if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    return max(0, int(free_at_start * share) - weight_bytes - workspace_bytes)


def kv_cache_bytes(groups: Sequence[CacheGroup], num_blocks: Sequence[int]) -> int:
    """Bytes of all blocks. ``num_blocks``: of each group."""
    return sum(count * group.row_bytes for count, group in zip(num_blocks, groups, strict=True))


@torch.inference_mode()
def measure_workspace(
    model: CausalLM, groups: Sequence[CacheGroup], config: EngineConfig, device: torch.device
) -> int:
    """Bytes that the largest step takes beside weights and KV: run it, over two blocks of KV that all its
    sequences share, and ask torch's allocator."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    _largest_step(model, groups, config, device)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return max(0, peak - before)


def _largest_step(
    model: CausalLM, groups: Sequence[CacheGroup], config: EngineConfig, device: torch.device
) -> None:
    storage = [torch.zeros(2, group.row_bytes, dtype=torch.uint8, device=device) for group in groups]
    batch = _largest_batch(model.spec, groups, config, device)
    hidden = model.forward(batch, KVTensors(groups, storage, model.dtype))
    logits = model.compute_logits(hidden[batch.logits_rows])
    rows = len(batch.logits_rows)
    sampling = SamplingState(rows, model.spec.vocab_size, device)
    for row in range(rows):
        sampling.add(row, SamplingParams(temperature=1.0, top_p=0.9, seed=row), prompt_token_ids=[0])
    Sampler()(logits, sampling.select(range(rows)))


def _largest_batch(
    spec: ModelSpec, groups: Sequence[CacheGroup], config: EngineConfig, device: torch.device
) -> ForwardBatch:
    """As many sequences as may run: one long chunk at the end of a full context, the others decode."""
    tokens = config.max_num_batched_tokens
    seqs = min(config.max_num_seqs, tokens)
    query_lens = [1] * (seqs - 1) + [tokens - seqs + 1]
    longest = max(wanted_model_len(config, spec), tokens)
    seq_lens = [min(longest, max(1, GATHER_TOKENS // seqs))] * (seqs - 1) + [longest]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    tables = []
    for group in groups:
        width = -(-longest // group.tokens_per_block)
        if isinstance(group.spec, State):
            row = torch.ones(seqs, 1, dtype=torch.int32, device=device)
            tables.append(GroupTables(row, torch.ones(seqs, dtype=torch.int64, device=device)))
            continue
        table = torch.ones(seqs, width, dtype=torch.int32, device=device)
        tables.append(GroupTables(table, torch.full((tokens,), group.block_size, device=device)))
    return ForwardBatch(
        input_ids=torch.arange(tokens, device=device) % spec.vocab_size,
        positions=torch.arange(tokens, device=device),
        query_start=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        logits_rows=starts[1:].long().to(device) - 1,
        groups=tuple(tables),
        num_decodes=seqs if query_lens[-1] == 1 else seqs - 1,
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
    )
