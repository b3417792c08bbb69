"""Logging and Prometheus metrics."""
