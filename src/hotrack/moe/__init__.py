"""Router, experts, slot table."""
