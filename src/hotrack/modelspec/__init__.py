"""config.json / GGUF metadata -> typed ModelSpec; weight and KV byte arithmetic. Torch-free."""
