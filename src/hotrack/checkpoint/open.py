"""A checkpoint as the loader sees it: names, shapes and a way to read, whatever the file format."""

import difflib
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hotrack.checkpoint.gguf_format import open_gguf
from hotrack.checkpoint.quantised import join_scales
from hotrack.checkpoint.safetensors_format import open_folder
from hotrack.checkpoint.stored import StoredTensor, TensorFile
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel
from hotrack.modelspec import ModelSpec, load_spec


class TensorInfo(NamedTuple):
    """``dtype`` is torch's name, 'mxfp4', or the GGUF type (e.g. 'Q4_K') of a quantised tensor."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """Tensors under their Hugging Face names; a quantised one and its scales are one tensor under the
    weight's name. Owns its open files: a context manager, or ``close`` it.

    Reading is safe from several threads.
    """

    def __init__(
        self,
        resolved: ResolvedModel,
        spec: ModelSpec,
        tensors: Mapping[str, StoredTensor],
        files: list[TensorFile],
    ) -> None:
        self.resolved = resolved
        self.spec = spec
        self._tensors = tensors
        self._files = files

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors, without scales."""
        return sum(t.nbytes for t in self._tensors.values())

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def stored(self, name: str) -> StoredTensor:
        """The stored tensor; CheckpointError with the nearest name when there is none."""
        if (tensor := self._tensors.get(name)) is not None:
            return tensor
        near = difflib.get_close_matches(name, self._tensors, n=1)
        hint = f"; the nearest name is {near[0]!r}" if near else ""
        raise CheckpointError(f"{self.resolved.path} has no tensor {name!r}{hint}")

    def info(self, name: str) -> TensorInfo:
        tensor = self.stored(name)
        return TensorInfo(tensor.shape, tensor.dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The whole tensor as a new CPU tensor of ``dtype``."""
        tensor = self.stored(name)
        result = torch.empty(tensor.shape, dtype=dtype)
        tensor.copy_into(result)
        return result

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(resolved: ResolvedModel) -> Checkpoint:
    """Open and check all headers of a model; no weight is read yet.

    Raises CheckpointError when files are missing, damaged, hostile or of an unsupported kind.
    """
    if resolved.kind == "gguf":
        spec, tensors, files = open_gguf(resolved.path)
    else:
        spec = load_spec(resolved.path)
        stored, files = open_folder(resolved.path)
        try:
            tensors = join_scales(stored, spec)
        except BaseException:
            for file in files:
                file.close()
            raise
    return Checkpoint(resolved, spec, tensors, files)
