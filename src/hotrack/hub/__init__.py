"""Turns a MODEL named by a user into local files: folder, GGUF, Hugging Face repo, demo model."""

from hotrack.hub.model import ResolvedModel
from hotrack.hub.resolve import pull, resolve

__all__ = ["ResolvedModel", "pull", "resolve"]
