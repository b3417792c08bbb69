"""Words shared by both planes: errors, states, sampling parameters, request types, clock. Standard library
only."""
