"""A worker of the swap benchmark with a model's real weights: ``python -m hotrack.checkpoint.swap_worker``.

The protocol is that of ``hotrack.memory.swap_worker``. The tensors are the checkpoint's own, in bfloat16
and not fused: what is measured is their bytes.
"""

import contextlib

import torch

from hotrack.checkpoint.open import open_checkpoint
from hotrack.core.progress import Progress
from hotrack.core.tensorspec import TensorSpec
from hotrack.hub.resolve import resolve
from hotrack.memory.swap_member import Landing, Load, SwapMember
from hotrack.memory.swap_worker import member_operations, serve


class ModelMember(SwapMember):
    """Weights of a folder, a GGUF file or a known name."""

    def open_model(self, model: str) -> tuple[list[TensorSpec], Load]:
        checkpoint = open_checkpoint(resolve(model))
        specs = [TensorSpec(name, checkpoint.info(name).shape, "bfloat16") for name in checkpoint.names()]
        total = sum(spec.nbytes for spec in specs)

        def load(landing: Landing, progress: Progress) -> None:
            done = 0
            for spec in specs:
                checkpoint.stored(spec.name).copy_into(landing(spec.name))
                self.landed(spec.name)
                done += spec.nbytes
                progress(done, total)
            checkpoint.close()

        return specs, load


if __name__ == "__main__":
    torch.set_num_threads(1)  # readers decode; the copies of sleep and wake have threads of their own
    with contextlib.suppress(BrokenPipeError):
        serve(member_operations(ModelMember()))
