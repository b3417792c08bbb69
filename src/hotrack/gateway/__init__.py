"""OpenAI-compatible HTTP front of the pool; byte-exact streaming pass-through."""
