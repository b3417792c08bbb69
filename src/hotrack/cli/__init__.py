"""The hotrack command."""
