"""safetensors and GGUF readers; streamed, checked loading into planned regions."""
