"""Captured CUDA graphs of a member of the swap benchmark."""

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from hotrack.memory.swap_contents import fingerprint

_SIDE = 2048  # of the square matrices: 16 MiB as float32, so that a graph's memory counts


class SwapGraphs:
    """Each graph multiplies bytes of one weight tensor by themselves: its intermediates and its result live
    in the graph pool, its inputs in the weights, as in a model."""

    def __init__(self, tensors: Sequence[Tensor], pool: Any, count: int) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._outputs: list[Tensor] = []
        inputs = [tensors[index * len(tensors) // count] for index in range(count)]
        warm = torch.cuda.Stream(tensors[0].device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(warm):  # libraries allocate on first use; that may not happen in a capture
            for data in inputs:
                _work(data)
        warm.synchronize()
        for data in inputs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=warm):
                self._outputs.append(_work(data))
            self._graphs.append(graph)
        self._wanted = self._replay()

    def replay_is_identical(self) -> bool:
        """Replay with poisoned memory: nothing that an earlier run left behind can help."""
        return self._replay() == self._wanted

    def _replay(self) -> list[int]:
        """Fingerprints: the results themselves would take longer to the host than a small member's cycle."""
        results = []
        for graph, output in zip(self._graphs, self._outputs, strict=True):
            output.view(torch.uint8).fill_(0xFF)
            graph.replay()
            results.append(fingerprint(output))
        return results


def _work(data: Tensor) -> Tensor:
    """float32 [side, side]: small integers would hide a changed order of summation, so they are scaled."""
    flat = data.view(-1).view(torch.uint8)
    side = min(_SIDE, isqrt(flat.numel()))
    matrix = flat[: side * side].view(side, side).to(torch.float32).sub(127.5).mul(0.017)
    return (matrix @ matrix).relu_()
