"""Kernels in C, compiled on the machine they run on. Each has a twin in torch, used where no compiler is."""
