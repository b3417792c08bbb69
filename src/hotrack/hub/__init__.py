"""Turns a MODEL named by a user into local files: folder, GGUF, Hugging Face repo, demo model."""
