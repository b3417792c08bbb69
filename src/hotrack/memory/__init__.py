"""Sleep and wake of tagged memory regions: Region, HostStore, Sleeper."""
