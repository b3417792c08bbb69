"""Chooses the kernels of a device, once."""

import torch

from hotrack.kernels.base import AttentionPlan, Ops

__all__ = ["AttentionPlan", "Ops", "select_ops"]


def select_ops(device: torch.device) -> Ops:
    """Kernels for ``device``."""
    return Ops()
