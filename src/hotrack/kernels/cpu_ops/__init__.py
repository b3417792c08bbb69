"""Fast kernels for CPUs, from torch's own operators."""
