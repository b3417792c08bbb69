"""Kernels in Triton. The twin of each, in plain torch, is in ``kernels.reference``."""
