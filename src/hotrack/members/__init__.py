"""Launching, probing and speaking to member engines."""
