"""Context-parallel attention on packed sequences."""
