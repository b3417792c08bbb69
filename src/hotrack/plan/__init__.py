"""Memory ledger and capacity arithmetic (pure)."""
