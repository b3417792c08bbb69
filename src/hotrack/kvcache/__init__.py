"""KV accounting (BlockPool, PrefixCache) and packed-row KV tensors."""
