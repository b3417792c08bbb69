"""Operators: `ops` (dispatch), `reference` (plain torch)."""
