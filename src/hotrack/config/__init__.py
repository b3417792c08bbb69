"""Typed, closed configuration: pool YAML, engine options, environment (the only reader of it)."""
