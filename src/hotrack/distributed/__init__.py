"""Tensor-parallel groups and collectives."""
