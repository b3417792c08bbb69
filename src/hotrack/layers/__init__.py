"""Model building blocks and the ForwardBatch they take."""
