"""Kernels for NVIDIA GPUs. Nothing in here waits for the device.

Every operation that is not plain torch has a twin in torch beside it, which runs on any device.
"""
