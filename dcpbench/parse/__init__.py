"""Console logs made anywhere, read back into records: one module per format."""
