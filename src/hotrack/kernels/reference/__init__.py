"""Every kernel in plain torch: the documentation, and what the fast versions are tested against."""
