"""Fused kernels in Triton. The twin of each, in plain torch, is in ``cuda_ops`` or ``reference``."""
