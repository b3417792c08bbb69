"""Which members own the devices now: run loop, SwapScheduler, eviction, Effects."""
