"""Chooses the kernels of a device, once."""

import torch

from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.cpu_ops.ops import CpuOps

__all__ = ["AttentionPlan", "Ops", "select_ops"]


def select_ops(device: torch.device) -> Ops:
    """The CPU's fast kernels, or the reference ones on a device that has none yet."""
    return CpuOps() if device.type == "cpu" else Ops()
