"""What every model family shares: the decoder stack and the life of its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.core.tensorspec import TensorSpec
from hotrack.kernels.base import Kernel
from hotrack.kvcache.spec import CacheSpec
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.attention import Attention
from hotrack.layers.base import Build, Layer
from hotrack.layers.batch import ForwardBatch
from hotrack.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from hotrack.layers.norm import RMSNorm
from hotrack.layers.rope import RotaryEmbedding
from hotrack.layers.step import Step, plan_attention, plan_states
from hotrack.models.decoder import DecoderLayer
from hotrack.models.names import NameTable, checkpoint_name
from hotrack.modelspec.spec import ModelSpec
from hotrack.moe.block import SparseMoE

Allocate = Callable[[Sequence[TensorSpec]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Stages:
    """Names of the parameters that each part of a forward pass reads, in execution order."""

    embedding: list[str]
    layers: list[list[str]]
    norm: list[str]
    head: list[str]


class CausalLM(Layer):
    """Embedding, decoder layers, final norm and head.

    Built in two phases: the constructor only declares parameters (on the meta device, in execution order);
    :meth:`materialize` gives them memory. A family is a subclass with its checkpoint names.
    """

    names: ClassVar[NameTable]

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__(build)
        self.spec = spec
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, build)
        self.layers = nn.ModuleList(DecoderLayer(i, spec, build) for i in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, build, zero_centred=spec.zero_centred_norm)
        self.lm_head = ParallelLMHead(spec.vocab_size, spec.hidden_size, build)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.decoder_layers = [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.heads = {
            index: layer.mixer.heads
            for index, layer in enumerate(self.decoder_layers)
            if isinstance(layer.mixer, Attention)
        }

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor:
        """T tokens -> hidden states after the final norm [T, D]; their K and V are cached afterwards."""
        step = Step(
            [rotary(batch.positions) for rotary in self.rotary],
            plan_attention(batch, kv, self.heads, self.ops),
            plan_states(batch, kv),
            kv,
        )
        wait_for = batch.wait_for or _no_wait
        wait_for(self.stages.embedding)
        hidden = self.embed_tokens(batch.input_ids)  # [T, D]
        for layer, names in zip(self.decoder_layers, self.stages.layers, strict=True):
            wait_for(names)
            hidden = layer(hidden, step)
        wait_for(self.stages.norm)
        return self.norm(hidden)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> float32 [R, vocab_size], the whole vocabulary on every rank"""
        return self.lm_head(hidden)

    def cache_specs(self) -> list[CacheSpec]:
        """Per layer, what a token leaves in the cache of this rank."""
        return [layer.mixer.cache_spec() for layer in self.decoder_layers]

    # The life of the parameters: declared, placed, loaded, packed; unpacked for sleep, packed after waking.

    def tensor_specs(self) -> list[TensorSpec]:
        """Every parameter in execution order; tied ones once."""
        return [
            TensorSpec(name, tuple(param.shape), str(param.dtype).removeprefix("torch."))
            for name, param in self.named_parameters()
        ]

    def materialize(self, allocate: Allocate, device: torch.device) -> None:
        """Put every parameter where ``allocate`` placed it."""
        placed = allocate(self.tensor_specs())
        ours = {
            id(param): nn.Parameter(placed[name], requires_grad=False)
            for name, param in self.named_parameters()
        }
        for module in self.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, ours[id(param)])  # tied parameters stay one object
        windowed = self.spec.windowed
        ropes = [self.spec.rope] if windowed is None else [self.spec.rope, windowed.rope]
        self.rotary = [RotaryEmbedding(rope, self.ops, self.dtype, device) for rope in ropes]
        for layer in self._parts():
            layer.bind()
        for module in self.modules():
            # Plain attributes are found at once; nn.Module.__getattr__ costs 2 ms per step over 30 layers.
            vars(module).update(module._modules)
        self._kernels = self._bound_kernels()
        self.stages = self._stages()

    def _stages(self) -> Stages:
        names = {id(param): name for name, param in self.named_parameters()}

        def read_by(module: nn.Module) -> list[str]:
            return [names[id(param)] for param in module.parameters()]

        layers = [read_by(layer) for layer in self.decoder_layers]
        return Stages(read_by(self.embed_tokens), layers, read_by(self.norm), read_by(self.lm_head))

    def load_plan(self) -> Mapping[str, LoadTarget]:
        """Parameter name -> which checkpoint tensors fill it on this rank."""
        plan = {}
        owners = dict(self.named_modules())
        for name, param in self.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = owners[owner]
            assert isinstance(module, Layer)
            sources = tuple(
                Source(checkpoint_name(self.names, name, shard.part), shard.dest, shard.select, add=shard.add)
                for shard in module.shards(leaf)
            )
            plan[name] = LoadTarget(param.data, sources)
        return plan

    def after_load(self) -> None:
        """Weights are in place: make the packed copies that compute reads."""
        for name in self._kernels:
            self.pack(name)

    def pack(self, name: str) -> list[str]:
        """Make the packed copy of one parameter that is in place. Returns ``[name]`` if its own bytes are not
        read any more: their pages may be dropped until the next pack."""
        kernels = self._kernels.get(name, [])
        for kernel in kernels:
            kernel.pack()
        return [name] if self._is_redundant(name) else []

    def _is_redundant(self, name: str) -> bool:
        kernels = self._kernels.get(name, [])
        reads_rows = name == "embed_tokens.weight"  # looked up by token, whatever the head has packed
        return bool(kernels) and not reads_rows and not any(kernel.reads_weight() for kernel in kernels)

    def before_sleep(self) -> None:
        """Free the packed copies."""
        for kernel in self._all_kernels():
            kernel.unpack()

    def prepacked_bytes(self) -> int:
        """Bytes of all packed copies."""
        return sum(kernel.packed_bytes() for kernel in self._all_kernels())

    def redundant_after_prepack(self) -> list[str]:
        """Parameters not read while packed copies exist; their pages may be dropped until the next pack."""
        return [name for name in self._kernels if self._is_redundant(name)]

    def record_expert_counts(self, enabled: bool) -> None:
        """Start from zero, or stop, counting how many tokens each expert of each sparse layer gets."""
        for layer in self.decoder_layers:
            if isinstance(layer.mlp, SparseMoE):
                layer.mlp.record_counts(enabled)

    def expert_counts(self) -> dict[int, Tensor]:
        """Layer index -> int64 [num_experts], since counting was enabled."""
        found = {}
        for index, layer in enumerate(self.decoder_layers):
            if isinstance(layer.mlp, SparseMoE) and layer.mlp.counts is not None:
                found[index] = layer.mlp.counts
        return found

    def _parts(self) -> Iterator[Layer]:
        return (module for module in self.modules() if isinstance(module, Layer) and module is not self)

    def _all_kernels(self) -> Iterator[Kernel]:
        return (kernel for kernels in self._kernels.values() for kernel in kernels)

    def _bound_kernels(self) -> dict[str, list[Kernel]]:
        """Parameter name -> the kernels bound to it; a tied head counts under the embedding's name."""
        found: dict[str, list[Kernel]] = {}
        for name, module in self.named_modules():
            if isinstance(module, Layer):
                for leaf, kernel in module.kernels():
                    full = f"{name}.{leaf}"
                    tied = self.spec.tie_word_embeddings and full == "lm_head.weight"
                    found.setdefault("embed_tokens.weight" if tied else full, []).append(kernel)
        return found


def _no_wait(names: Sequence[str]) -> None:
    """Every weight is there."""
