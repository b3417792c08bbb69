"""Family name -> model class."""

import torch

from hotrack.core.errors import CheckpointError
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.kernels.ops import select_ops
from hotrack.layers.base import Build
from hotrack.models.causal_lm import Allocate, CausalLM
from hotrack.models.llama import LlamaForCausalLM
from hotrack.models.mimo_v2 import MiMoV2ForCausalLM
from hotrack.models.qwen3 import Qwen3ForCausalLM
from hotrack.models.qwen3_moe import Qwen3MoeForCausalLM
from hotrack.models.qwen3_next import Qwen3NextForCausalLM
from hotrack.modelspec.spec import ModelSpec

MODELS: dict[str, type[CausalLM]] = {
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
    "mimo_v2_flash": MiMoV2ForCausalLM,
    "mimo_v2": MiMoV2ForCausalLM,
}


def build_model(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, tp: TensorParallel, allocate: Allocate
) -> CausalLM:
    """Declare the model's parameters, let ``allocate`` place them, and return the model, its weights still
    unset.

    Raises CheckpointError for an unknown family or an activation other than SiLU, ConfigError when the
    tensor-parallel size does not divide the model.
    """
    if spec.family not in MODELS:
        raise CheckpointError(
            f"model type {spec.source!r} is not supported; supported families are {', '.join(sorted(MODELS))}"
        )
    if spec.hidden_act != "silu":
        raise CheckpointError(f"activation {spec.hidden_act!r} is not supported; only 'silu' is")
    build = Build(select_ops(device, dtype), tp, dtype)
    with torch.device("meta"):
        model = MODELS[spec.family](spec, build)
    model.materialize(allocate, device)
    return model.eval()
