"""One model's OpenAI-compatible HTTP server; started by module name, never imported by the control plane."""
