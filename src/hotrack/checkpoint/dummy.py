"""Synthetic weights for a config.json without a checkpoint: seeded per tensor, scaled so that activations
stay finite."""

import math
import zlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.core.progress import Progress
from hotrack.modelspec.spec import ModelSpec


def fill_dummy(
    targets: Mapping[str, LoadTarget],
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """Fill every target, computing on ``device``; a parameter that lives elsewhere goes through a copy there.

    A tensor's values depend on ``seed``, its published name, its shape, dtype and the kind of device.
    """
    total = sum(target.param.nbytes for target in targets.values())
    done = 0
    generator = torch.Generator(device)
    for target in targets.values():
        param = target.param
        values = param if param.device == device else torch.empty_like(param, device=device)
        values.zero_()  # rows of a split vocabulary that nothing fills
        parts: Counter[str] = Counter()  # runs of one tensor differ, too
        for source in target.sources:
            _fill(values, source, parts[source.name], spec, seed, generator)
            parts[source.name] += 1
        if values is not param:
            param.copy_(values)
        done += target.param.nbytes
        if progress is not None:
            progress(done, total)


def _fill(
    values: Tensor, source: Source, run: int, spec: ModelSpec, seed: int, generator: torch.Generator
) -> None:
    part = values[source.dest] if source.dest else values
    # 32 bits: torch's generator for CPUs ignores the others.
    generator.manual_seed(zlib.crc32(f"{seed}:{source.name}{f':{run}' if run else ''}".encode()))
    if "norm" in source.name:
        part.normal_(1.0, 0.1, generator=generator)
    elif part.dim() < 2:
        part.normal_(0.0, 0.02, generator=generator)
    else:
        part.normal_(0.0, _std(source.name, part, spec), generator=generator)


def _std(name: str, part: Tensor, spec: ModelSpec) -> float:
    """Keeps the variance of what goes through: embeddings of variance 1, products of the inputs' variance."""
    if "embed_tokens" in name and not spec.tie_word_embeddings:
        return 1.0
    return 1.0 / math.sqrt(part.shape[-1])
