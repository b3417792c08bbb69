"""Chooses the kernels of a device, once."""

import importlib
import importlib.util
import logging

import torch

from hotrack.config import env
from hotrack.kernels.base import AttentionPlan, Ops
from hotrack.kernels.cpu_ops.ops import CpuOps
from hotrack.kernels.cuda_ops.ops import CudaOps
from hotrack.kernels.native.compiler import NativeUnavailableError, NotThisMachineError
from hotrack.kernels.native.cpu import NativeOps, library

__all__ = ["AttentionPlan", "Ops", "select_ops"]

_log = logging.getLogger(__name__)


def select_ops(device: torch.device, dtype: torch.dtype = torch.float32) -> Ops:
    """The fastest kernels there are for models of ``dtype`` on ``device``; the reference ones if none are."""
    if device.type == "cuda":
        return _cuda_ops()
    if device.type != "cpu":
        return Ops()
    if dtype is torch.bfloat16 and env.native_kernels():
        try:
            return NativeOps(library(), torch.get_num_threads())
        except NativeUnavailableError as error:
            level = logging.INFO if isinstance(error, NotThisMachineError) else logging.WARNING
            _log.log(level, "torch's own CPU kernels are used: %s", error)
    return CpuOps()


def _cuda_ops() -> Ops:
    """Fused ones where Triton is installed, as it is with torch on Linux."""
    if importlib.util.find_spec("triton") is None:
        _log.warning("Triton is not installed: torch's own kernels are used, which is slower")
        return CudaOps()
    fused: Ops = importlib.import_module("hotrack.kernels.triton_ops.ops").TritonOps()
    return fused
