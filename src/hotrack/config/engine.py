"""Options of one engine, with vLLM's spellings. Frozen; every default is stated here and nowhere else."""

import re
from dataclasses import dataclass

from hotrack.core.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")  # also cuda:N
LOAD_FORMATS = ("auto", "dummy")
HOST_COPIES = ("private", "shared")

ONE_DEVICE = r"cuda:\d{1,3}"  # one of several


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """``model``: folder, GGUF file, Hugging Face repo id or demo name.

    ``kv_cache_memory_bytes`` wins over ``gpu_memory_utilization``: the share of what the device has free at
    start (on a CPU: of its memory) that weights, KV and workspace may take together. Both None: 0.9 of a GPU;
    on a CPU, KV for ``max_num_seqs`` full contexts, at most 1 GiB.
    ``device``: 'cuda' is the current CUDA device, 'auto' that one if there is any, else the CPU.
    ``load_format``: 'dummy' makes random weights for a config.json instead of reading a checkpoint.
    ``host_copy``: 'shared' keeps the weights' host copy in named shared memory, on a GPU, so that the next
    start of the same model need not read its files.
    ``enforce_eager``: no CUDA graphs.
    ``block_size``: tokens per KV block. ``pipeline_depth``: steps planned ahead of the device (0 or 1).
    """

    model: str
    served_model_name: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_sleep_mode: bool = True
    host_copy: str = "private"
    enforce_eager: bool = False
    pipeline_depth: int = 1
    num_threads: int | None = None
    seed: int = 0
    rank_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        _one_of("host_copy", self.host_copy, HOST_COPIES)
        if self.host_copy == "shared" and not self.enable_sleep_mode:
            raise ConfigError(
                "--host-copy shared is where sleep mode keeps the weights; leave out --no-enable-sleep-mode"
            )
        if not re.fullmatch(ONE_DEVICE, self.device):
            _one_of("device", self.device, DEVICES, hint="; one of several GPUs is cuda:N")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be at least 1, got {self.max_model_len}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.pipeline_depth not in (0, 1):
            raise ConfigError(f"pipeline_depth must be 0 or 1, got {self.pipeline_depth}")


def _one_of(name: str, value: str, allowed: tuple[str, ...], hint: str = "") -> None:
    if value not in allowed:
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag} must be one of {', '.join(allowed)}; got {value!r}{hint}")
